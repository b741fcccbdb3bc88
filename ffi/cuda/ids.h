// Which row and which bag a position of a batch names.
#pragma once

#include <stdint.h>

#include "ffi/core/lookups.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cuda/notice.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// What a position reads that reads no row: nothing, or NaN, or nothing beside a notice.
constexpr int64_t kNoRow = -1, kPoisonedRow = -2, kNoticedRow = -3;

// The row of an id; one with all bits set is padding where there is any.
template <typename Int>
__device__ __forceinline__ int64_t ResolveId(Int id, bool padded, Bounds bounds, int64_t num_embeddings) {
  if (padded && id == static_cast<Int>(-1)) return kNoRow;
  const int64_t row = static_cast<int64_t>(id);
  if (row >= 0 && row < num_embeddings) return row;
  if (bounds == Bounds::kError || bounds == Bounds::kPoison) return kPoisonedRow;
  if (bounds == Bounds::kWarn) return kNoticedRow;
  // A table without rows has no nearest row.
  if (bounds == Bounds::kZero || num_embeddings == 0) return kNoRow;
  return row < 0 ? 0 : num_embeddings - 1;
}

// An id as the caller wrote it: beside a cache one with all bits set has only the highest one, because there all bits
// mark what is cached.
template <typename Int>
__device__ __forceinline__ int64_t WrittenId(Int id, bool padded) {
  constexpr Int kHighest = static_cast<Int>(Int{1} << (8 * sizeof(Int) - 1));
  return static_cast<int64_t>(padded && id == kHighest ? static_cast<Int>(-1) : id);
}

__device__ __forceinline__ int64_t WrittenWholeId(IdType type, const void* ids, int64_t i, bool padded) {
  switch (type) {
    case IdType::kUint32:
      return WrittenId(static_cast<const uint32_t*>(ids)[i], padded);
    case IdType::kInt64:
      return WrittenId(static_cast<const int64_t*>(ids)[i], padded);
    default:
      return WrittenId(static_cast<const int32_t*>(ids)[i], padded);
  }
}

// The same as ResolveId for position i of ids that are whole.
__device__ __forceinline__ int64_t ResolveWholeId(IdType type, const void* ids, int64_t i, bool padded, Bounds bounds,
                                                  int64_t num_embeddings) {
  switch (type) {
    case IdType::kUint32:
      return ResolveId(static_cast<const uint32_t*>(ids)[i], padded, bounds, num_embeddings);
    case IdType::kInt64:
      return ResolveId(static_cast<const int64_t*>(ids)[i], padded, bounds, num_embeddings);
    default:
      return ResolveId(static_cast<const int32_t*>(ids)[i], padded, bounds, num_embeddings);
  }
}

// The notices that some thread has looked at, by their places.  Each source that is compiled has its own.
static __device__ unsigned looked_at[kMaxNotices];

// Of the threads that come here, one writes.  `notice` may be null.
__device__ __forceinline__ void LeaveNotice(Notice* notice, int64_t id, int64_t position) {
  if (notice == nullptr) return;
  // The notice is memory of the host, which only the first one reads: recorded programs come here again for good.
  unsigned* const looked = &looked_at[reinterpret_cast<uintptr_t>(notice) / sizeof(Notice) % kMaxNotices];
  if (*static_cast<volatile unsigned*>(looked) != 0 || atomicExch(looked, 1u) != 0) return;
  if (atomicCAS(&notice->state, Notice::kFree, Notice::kTaken) != Notice::kFree) return;
  notice->id = id;
  notice->position = position;
  __threadfence_system();
  *static_cast<volatile unsigned*>(&notice->state) = Notice::kWritten;
}

// The id that digits stand for: -1 where all of them are, less for other negative ones, and past every end where any
// is no digit of this shape.
__device__ __forceinline__ int64_t JoinDigits(const TTShape& shape, const int32_t* digits) {
  bool all_minus_one = true, valid = true;
  int64_t id = 0;
#pragma unroll 1
  for (int k = 0; k < shape.d; ++k) {
    all_minus_one &= digits[k] == -1;
    valid &= digits[k] >= 0 && digits[k] < shape.p[k];
    if (valid) id = id * shape.p[k] + digits[k];
  }
  if (all_minus_one) return -1;
  return valid ? id : digits[0] < 0 ? -2 : INT64_MAX;
}

// The bag of an entry of a group, or -1 for one that lies in no bag.  offsets: [bags + 1]
__device__ __forceinline__ int32_t FindBag(const int32_t* offsets, int64_t bags, int64_t entry) {
  // Offsets up to `low` are at most `entry`, those from `high` on are above it.
  int64_t low = -1, high = bags + 1;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle] <= entry)
      low = middle;
    else
      high = middle;
  }
  return low < 0 || low >= bags ? -1 : static_cast<int32_t>(low);
}

}  // namespace jax_tt
