// A sort of the few keys of one block, most of whose rounds warps do in registers, without barriers.
#pragma once

#include <stdint.h>

#include "ffi/cuda/lanes.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// A run of keys in the registers of a warp: key i is in lane i % 32.
struct WarpKeys {
  static constexpr int kCount = 64;
  uint64_t first, second;  // of the lower and the upper half

  // Each lane keeps the lower or the higher one of its keys and those of the lane whose number differs by `mask`.
  __device__ __forceinline__ void Exchange(int mask, bool lower) {
    const uint64_t other_first = __shfl_xor_sync(kAllLanes, first, mask);
    const uint64_t other_second = __shfl_xor_sync(kAllLanes, second, mask);
    if ((other_first < first) == lower) first = other_first;
    if ((other_second < second) == lower) second = other_second;
  }
  // Sorts both halves, each of which is bitonic in runs of 2 step keys.  A loop that is not unrolled asks for both keys
  // before it waits for one of them.
  __device__ __forceinline__ void MergeHalves(int step) {
#pragma unroll 1
    for (; step > 0; step /= 2) Exchange(step, (threadIdx.x & step) == 0);
  }
  __device__ __forceinline__ void Sort() {
#pragma unroll 1
    for (int run = 1; run < 32; run *= 2) {
      Exchange(2 * run - 1, (threadIdx.x & run) == 0);
      MergeHalves(run / 2);
    }
    // The highest key of one half meets the lowest one of the other.
    const uint64_t reversed = __shfl_xor_sync(kAllLanes, second, 31), other = __shfl_xor_sync(kAllLanes, first, 31);
    if (reversed < first) first = reversed;
    if (other > second) second = other;
    MergeHalves(16);
  }
  __device__ __forceinline__ void Merge() {
    const uint64_t low = first, high = second;
    if (high < low) {
      first = high;
      second = low;
    }
    MergeHalves(16);
  }
};

// Sorts keys by bitonic merges.  Of each pair that is compared the lower key goes to the lower place, so that keys
// behind the last one, which would be the highest, need not exist.  Every thread of the block must call this.
template <int kThreads, typename Keys>
__device__ void SortByWarps(Keys keys, int count) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const auto in_registers = [&](auto arrange) {
    for (int run = (thread - lane) * 2; run < count; run += 2 * kThreads) {
      const int first = run + lane, second = first + 32;
      WarpKeys own{~uint64_t{0}, ~uint64_t{0}};
      if (first < count) own.first = keys[first];
      if (second < count) own.second = keys[second];
      arrange(own);
      if (first < count) keys[first] = own.first;
      if (second < count) keys[second] = own.second;
    }
    __syncthreads();
  };
  in_registers([](WarpKeys& own) { own.Sort(); });
  for (int run = WarpKeys::kCount; run < count; run *= 2) {
    // First the highest key of one run meets the lowest one of the next.
    int distance = 2 * run - 1;
    for (int step = run; step >= WarpKeys::kCount; step /= 2) {
      for (int pair = thread;; pair += kThreads) {
        const int place = ((pair & -step) << 1) + (pair & (step - 1)), other = place ^ distance;
        if (place >= count) break;
        if (other >= count) continue;
        const uint64_t low = keys[place], high = keys[other];
        if (low > high) {
          keys[place] = high;
          keys[other] = low;
        }
      }
      __syncthreads();
      distance = step / 2;
    }
    in_registers([](WarpKeys& own) { own.Merge(); });
  }
}

}  // namespace jax_tt
