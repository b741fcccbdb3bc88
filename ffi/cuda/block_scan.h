// Exclusive sums over the threads of a block.
#pragma once

#include <stdint.h>

#include "ffi/cuda/lanes.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

constexpr int kMaxWarps = 32;  // of a block: what the scans need of shared words

// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ int32_t WarpScan(int32_t value) {
  const int lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

// Sum of the values of all threads below this one; *total: that of all.  A block is a multiple of 32 threads.
__device__ __forceinline__ int32_t BlockScan(int32_t value, Shared<int32_t> sums, int32_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int32_t inclusive = WarpScan(value);
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  if (warp == 0) {
    const int32_t own = lane < warps ? static_cast<int32_t>(sums[lane]) : 0;
    const int32_t scanned = WarpScan(own);
    if (lane < warps) sums[lane] = scanned;
  }
  __syncthreads();
  *total = sums[warps - 1];
  const int32_t below = (warp == 0 ? 0 : static_cast<int32_t>(sums[warp - 1])) + inclusive - value;
  __syncthreads();
  return below;
}

// Replaces values[0 .. count) by their exclusive sums.  Returns the sum of all.
template <typename Values>
__device__ int32_t ScanArray(Values values, int64_t count, Shared<int32_t> sums) {
  const int64_t each = (count + blockDim.x - 1) / blockDim.x;
  const int64_t first = each * threadIdx.x;
  const int64_t begin = first < count ? first : count, end = begin + each < count ? begin + each : count;
  int32_t own = 0, total = 0;
  for (int64_t i = begin; i < end; ++i) own += values[i];
  int32_t running = BlockScan(own, sums, &total);
  for (int64_t i = begin; i < end; ++i) {
    const int32_t value = values[i];
    values[i] = running;
    running += value;
  }
  __syncthreads();
  return total;
}

}  // namespace jax_tt
