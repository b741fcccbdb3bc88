#include "ffi/core/plan.h"

#include <initializer_list>

namespace jax_tt {

int64_t ChunkRows(const TTShape& shape, const Contraction& contraction) {
  // Per row: its values or gradient, its share of the secondary gradient, and one node product and one node gradient
  // per level.
  int64_t elements = shape.dim() + contraction.secondary.product_size(contraction.secondary.depth);
  for (const Side* side : {&contraction.primary, &contraction.secondary})
    for (int k = 1; k <= side->depth; ++k) elements += 2 * side->product_size(k);
  const int64_t rows = kChunkBytes / (4 * elements);
  return rows < 1024 ? 1024 : rows;
}

int64_t SavedPerPosition(const TTShape& shape, const Contraction& contraction, int64_t n) {
  const Side& side = contraction.primary;
  if (side.depth < 2 || n > ChunkRows(shape, contraction)) return 0;
  const int64_t elements = side.product_size(side.depth);
  return n * elements * 4 <= kSavedBytes ? elements : 0;
}

}  // namespace jax_tt
