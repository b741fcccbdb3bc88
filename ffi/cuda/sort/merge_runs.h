// A sort of the keys of one block: warps sort runs in their registers, then threads find the places of keys in the
// runs beside their own.  A block waits once for several runs that become one.
#pragma once

#include <stdint.h>

#include "ffi/cuda/lanes.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

constexpr int kSortedRun = 32;  // keys of a warp
constexpr int kMergedRuns = 4;  // that become one

// Sorts the keys of the lanes by bitonic merges.  Every lane must call this.
__device__ __forceinline__ uint64_t SortLanes(uint64_t key) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int run = 2; run <= 32; run *= 2) {
#pragma unroll
    for (int distance = run / 2; distance > 0; distance /= 2) {
      const uint64_t other = __shfl_xor_sync(kAllLanes, key, distance);
      const bool takes_less = ((lane & distance) == 0) == ((lane & run) == 0);
      if ((other < key) == takes_less) key = other;
    }
  }
  return key;
}

// Sorts keys of which no two are equal and of which runs of kSortedRun, of which the last may be shorter, are sorted.
// Leaves them in *keys, which it exchanges with *others.  Every thread of the block must call this.
template <int kThreads, typename Keys>
__device__ __forceinline__ void MergeRuns(Keys* keys, Keys* others, int count) {
#pragma unroll 1
  for (int run = kSortedRun; run < count; run *= kMergedRuns) {
    const Keys from = *keys, to = *others;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const uint64_t key = from[i];
      const int first = i & -(run * kMergedRuns);
      int begin[kMergedRuns - 1], length[kMergedRuns - 1], less[kMergedRuns - 1] = {};
#pragma unroll
      for (int k = 0; k < kMergedRuns - 1; ++k) {
        begin[k] = first + ((i + (k + 1) * run) & (run * kMergedRuns - run));
        length[k] = min(run, count - begin[k]);
      }
#pragma unroll 1
      for (int step = run; step > 0; step /= 2) {
#pragma unroll
        for (int k = 0; k < kMergedRuns - 1; ++k) {
          const int tried = less[k] + step;
          if (tried <= length[k] && from[begin[k] + tried - 1] < key) less[k] = tried;
        }
      }
      int place = first + (i & (run - 1));
#pragma unroll
      for (int k = 0; k < kMergedRuns - 1; ++k) place += less[k];
      to[place] = key;
    }
    __syncthreads();
    *keys = to;
    *others = from;
  }
}

}  // namespace jax_tt
