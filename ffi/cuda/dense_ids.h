// Which row and which bag a position of a batch names.
#ifndef JAX_TT_CUDA_DENSE_IDS_H_
#define JAX_TT_CUDA_DENSE_IDS_H_

#include <stdint.h>

#include "ffi/cuda/dense.h"

namespace jax_tt {

// What a position reads that reads no row: nothing, or NaN.
constexpr int64_t kNoRow = -1, kPoisonedRow = -2;

template <typename Int>
__device__ __forceinline__ int64_t ResolveId(const DenseBatch& batch, int64_t position) {
  const Int id = static_cast<const Int*>(batch.ids)[position];
  if (batch.padded && id == static_cast<Int>(-1)) return kNoRow;
  const int64_t row = static_cast<int64_t>(id);
  if (row >= 0 && row < batch.num_embeddings) return row;
  if (batch.bounds == Bounds::kError || batch.bounds == Bounds::kPoison) return kPoisonedRow;
  // A table without rows has no nearest row.
  if (batch.bounds == Bounds::kZero || batch.num_embeddings == 0) return kNoRow;
  return row < 0 ? 0 : batch.num_embeddings - 1;
}

__device__ __forceinline__ int64_t ResolveId(const DenseBatch& batch, int64_t position) {
  switch (batch.type) {
    case IdType::kUint32:
      return ResolveId<uint32_t>(batch, position);
    case IdType::kInt64:
      return ResolveId<int64_t>(batch, position);
    default:
      return ResolveId<int32_t>(batch, position);
  }
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
  const int32_t* offsets = batch.offsets + group * (batch.bags + 1);
  const int64_t within = position - group * batch.capacity;
  // Offsets up to `low` are at most `within`, those from `high` on are above it.
  int64_t low = -1, high = batch.bags + 1;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle] <= within)
      low = middle;
    else
      high = middle;
  }
  return low < 0 || low >= batch.bags ? -1 : static_cast<int32_t>(group * batch.bags + low);
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_IDS_H_
