// What a batch names: rows by position, groups, and offsets that are in order.  A batch is any struct with the ids, the
// offsets and the sizes of Lookups.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "ffi/cuda/ids.h"

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)

namespace jax_tt {

// Of offset i, the first of its group or another.
template <typename Batch>
__device__ __forceinline__ bool OffsetIsSound(const Batch& batch, int64_t i, bool first) {
  const int32_t offset = batch.offsets[i], before = batch.offsets[first ? i : i - 1];
  return (!first || offset == 0) && offset >= before && offset <= batch.capacity;
}

// The offsets of the group of a position, which a plan holds in 32 bits, and the place of the position in it.
struct PlaceInGroup {
  int64_t group, entry;
  const int32_t* offsets;

  template <typename Batch>
  __device__ __forceinline__ PlaceInGroup(const Batch& batch, int64_t position)
      : group(batch.groups == 1 ? 0 : static_cast<uint32_t>(position) / static_cast<uint32_t>(batch.capacity)),
        entry(position - group * batch.capacity),
        offsets(batch.offsets + group * (batch.bags + 1)) {}
};

// No digits: the ids of a batch are whole.
struct WholeIds {};

// The ids of positions first + k step; behind `last` comes that of `last`.  All are asked for before any is looked at,
// so that no load waits for another.  `join(i)`: the id of digits, or WholeIds.  Index: int32_t where positions are
// few, and narrow instructions do.
template <int kCount, typename Index, typename Batch, typename Join>
__device__ __forceinline__ void LoadIds(const Batch& batch, Join join, Index first, Index step, Index last,
                                        int64_t (&ids)[kCount]) {
  // Of the same width whatever their type, so that the code for what they mean is there once.
  const auto load = [&](auto id_at) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) ids[k] = id_at(min(static_cast<Index>(first + k * step), last));
  };
  switch (batch.type) {
    case IdType::kUint32:
      load([&](Index i) { return static_cast<const uint32_t*>(batch.ids)[i]; });
      break;
    case IdType::kInt64:
      load([&](Index i) { return static_cast<const int64_t*>(batch.ids)[i]; });
      break;
    case IdType::kDigits:
      if constexpr (!std::is_same_v<Join, WholeIds>) {
        load(join);
        break;
      }
      [[fallthrough]];
    default:
      load([&](Index i) { return static_cast<const int32_t*>(batch.ids)[i]; });
  }
}

// What ids name, compared with the table all at once.
struct IdRange {
  int64_t padding;    // marks padding where there is any
  uint64_t rows_end;  // ids below are rows

  template <typename Batch>
  __device__ __forceinline__ IdRange(const Batch& batch, int64_t num_embeddings)
      : padding(batch.type == IdType::kUint32 ? int64_t{UINT32_MAX} : int64_t{-1}),
        rows_end(static_cast<uint64_t>(num_embeddings)) {
    // An id with all bits set lies outside even where a table has so many rows.
    if (batch.padded) rows_end = min(rows_end, static_cast<uint64_t>(padding));
  }
  // Whether all ids are rows, as nearly all are.
  template <int kCount>
  __device__ __forceinline__ bool Has(const int64_t (&ids)[kCount]) const {
    bool all = true;
#pragma unroll
    for (int k = 0; k < kCount; ++k) all &= static_cast<uint64_t>(ids[k]) < rows_end;
    return all;
  }
  // Sets ids to the rows that they name, or why they name none.
  template <int kCount, typename Batch>
  __device__ __forceinline__ void Resolve(const Batch& batch, int64_t num_embeddings, int64_t (&ids)[kCount]) const {
    const int64_t below = ResolveId(int64_t{-1}, /*padded=*/false, batch.bounds, num_embeddings);
    const int64_t above = ResolveId(INT64_MAX, /*padded=*/false, batch.bounds, num_embeddings);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const bool is_padding = batch.padded && ids[k] == padding;
      if (ids[k] < 0 || ids[k] >= num_embeddings) ids[k] = ids[k] < 0 ? below : above;
      if (is_padding) ids[k] = kNoRow;
    }
  }
};

// The rows that positions first + k step of a batch with n > 0 ids name, or why they name none; behind the batch is
// none.
template <int kCount, typename Index, typename Batch, typename Join>
__device__ __forceinline__ void RowsOf(const Batch& batch, Index n, int64_t num_embeddings, Join join, Index first,
                                       Index step, int64_t (&rows)[kCount]) {
  LoadIds(batch, join, first, step, static_cast<Index>(n - 1), rows);
  // Behind the last bag is none.  Offsets out of order are noticed elsewhere.
  Index end = batch.bags == 0 ? 0 : n;
  if (batch.groups == 1) end = min(end, static_cast<Index>(batch.offsets[batch.bags]));
  const IdRange range(batch, num_embeddings);
  if (!range.Has(rows) || first + (kCount - 1) * step >= end) {  // seldom: one branch for all
    range.Resolve(batch, num_embeddings, rows);
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (first + k * step >= end) rows[k] = kNoRow;
  }
  if (batch.groups == 1) return;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const PlaceInGroup at(batch, min(static_cast<Index>(first + k * step), n - 1));
    if (at.entry >= at.offsets[batch.bags]) rows[k] = kNoRow;
  }
}

// Positions before this are all in bags: all of them where every group is full, as bags of one size make it, and with
// a single group those before its last offset.  None where a look at each position is needed to tell.  Every thread of
// the block must call this.
template <typename Batch>
__device__ __forceinline__ int EndOfFullGroups(const Batch& batch, int n) {
  if (batch.bags == 0) return 0;
  if (batch.groups == 1) return min(n, static_cast<int>(batch.offsets[batch.bags]));
  bool full = true;
  for (int64_t group = threadIdx.x; group < batch.groups; group += blockDim.x)
    full &= batch.offsets[(group + 1) * (batch.bags + 1) - 1] == batch.capacity;
  return __syncthreads_and(full) ? n : 0;
}

}  // namespace jax_tt

#endif  // __CUDACC__ || JAX_TT_EMULATION
