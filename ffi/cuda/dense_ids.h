// Rows, bags and positions of a batch of lookups in a dense table.
#ifndef JAX_TT_CUDA_DENSE_IDS_H_
#define JAX_TT_CUDA_DENSE_IDS_H_

#include <stdint.h>

#include "ffi/cuda/dense.h"
#include "ffi/cuda/ids.h"

namespace jax_tt {

__device__ __forceinline__ int64_t ResolveId(const DenseBatch& batch, int64_t position) {
  return ResolveWholeId(batch.type, batch.ids, position, batch.padded, batch.bounds, batch.num_embeddings);
}

// The positions of a bag.  Offsets out of order are clamped to positions that exist, and told.
struct BagRange {
  int64_t begin, end;
  bool valid;
};

__device__ __forceinline__ BagRange PositionsOf(const DenseBatch& batch, int64_t bag) {
  const uint32_t bags = static_cast<uint32_t>(batch.bags);
  const int64_t group = static_cast<uint32_t>(bag) / bags;
  const int32_t* offsets = batch.offsets + group * (batch.bags + 1);
  const int64_t within = bag - group * batch.bags, base = group * batch.capacity;
  const int64_t first = offsets[0], begin = offsets[within], end = offsets[within + 1];
  const int64_t low = min(max(begin, int64_t{0}), batch.capacity), high = min(max(end, low), batch.capacity);
  return {base + low, base + high, first == 0 && low == begin && high == end};
}

// The bag of a position, or -1 for one that lies in no bag.
__device__ __forceinline__ int32_t BagOf(const DenseBatch& batch, int64_t position) {
  const int64_t group = static_cast<uint32_t>(position) / static_cast<uint32_t>(batch.capacity);
  const int32_t bag = FindBag(batch.offsets + group * (batch.bags + 1), batch.bags, position - group * batch.capacity);
  return bag < 0 ? -1 : static_cast<int32_t>(group * batch.bags + bag);
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_IDS_H_
