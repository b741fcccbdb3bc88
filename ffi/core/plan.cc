#include "ffi/core/plan.h"

namespace jax_tt {

int64_t ChunkRows(const TTShape& shape, const Contraction& contraction) {
  // Per row: its values, its secondary product transposed, and for every level that is kept in memory (all but the
  // deepest primary one) a product and a gradient with the shares that add up to it: four at level 1, one above.
  const auto kept = [](const Side& side, int k) { return (k == 1 ? 5 : 3) * side.product_size(k); };
  const Side& primary = contraction.primary;
  const Side& secondary = contraction.secondary;
  int64_t elements = shape.dim() + secondary.product_size(secondary.depth);
  for (int k = 1; k <= secondary.depth; ++k) elements += kept(secondary, k);
  for (int k = 1; k < primary.depth; ++k) elements += kept(primary, k);
  const int64_t rows = kChunkBytes / (4 * elements);
  return rows < 64 ? 64 : rows;
}

int64_t SavedPerPosition(const TTShape& shape, const Contraction& contraction, int64_t n) {
  const Side& side = contraction.primary;
  if (side.depth < 2 || n > ChunkRows(shape, contraction)) return 0;
  const int64_t elements = side.product_size(side.depth);
  return n * elements * 4 <= kSavedBytes ? elements : 0;
}

}  // namespace jax_tt
