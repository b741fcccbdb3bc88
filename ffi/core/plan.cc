#include "ffi/core/plan.h"

namespace jax_tt {

int64_t ChunkRows(const TTShape& shape, const Contraction& contraction) {
  // Per row: its values, its secondary product transposed, and for every level that is kept in memory (all but the
  // deepest primary one) a product, a gradient and a child's share of one.
  const Side& primary = contraction.primary;
  const Side& secondary = contraction.secondary;
  int64_t elements = shape.dim() + secondary.product_size(secondary.depth);
  for (int k = 1; k <= secondary.depth; ++k) elements += 3 * secondary.product_size(k);
  for (int k = 1; k < primary.depth; ++k) elements += 3 * primary.product_size(k);
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
