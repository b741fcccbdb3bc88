// The offsets of bags as a caller gave them: a block looks at one array of one example.
#include <algorithm>

#include "ffi/cuda/lanes.h"
#include "ffi/cuda/offsets/offsets.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr size_t kMostArrays = 64;  // of a launch

struct Arrays {
  BagOffsets of[kMostArrays];
  int64_t count = 0;  // of this launch, from `first` on
  int64_t first = 0, all = 0;
};

__device__ __forceinline__ int32_t MaxOfLanesBelow(int32_t value) {
  const int lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value = max(value, below);
  }
  return value;
}

// Each offset is raised to the ones before and lowered to the capacity; the first one is 0.
__device__ void Repair(const int32_t* given, int64_t size, int32_t capacity, int32_t* offsets,
                       Shared<int32_t> of_warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t before = 0;
  for (int64_t first = 0; first < size; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const int32_t own = i > 0 && i < size ? max(min(given[i], capacity), 0) : 0;
    int32_t most = MaxOfLanesBelow(own);
    if (lane == 31) of_warps[warp] = most;
    __syncthreads();
    int32_t all = before;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) most = max(most, all);
      all = max(all, static_cast<int32_t>(of_warps[w]));
    }
    if (i < size) offsets[i] = most;
    before = all;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads)
    Enter(const __grid_constant__ Arrays arrays, const int32_t* capacities, bool refuses, int32_t* refused) {
  SharedArena arena;
  const Shared<int32_t> of_warps = arena.Take<int32_t>(kWarps);
  const int64_t example = blockIdx.x / arrays.count, k = blockIdx.x % arrays.count;
  const BagOffsets& array = arrays.of[k];
  const int64_t size = array.size, place = example * arrays.all + arrays.first + k;
  const int32_t* given = array.given + example * size;
  int32_t* offsets = array.offsets + example * size;
  const int32_t capacity = capacities[place];

  bool wrong = false;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    const int32_t own = given[i], next = i + 1 < size ? given[i + 1] : capacity;
    wrong |= own > next || (i == 0 && own != 0);
    offsets[i] = own;
  }
  wrong = __syncthreads_or(wrong);
  if (threadIdx.x == 0) refused[place] = wrong && refuses;
  if (!wrong) return;
  if (!refuses) return Repair(given, size, capacity, offsets, of_warps);
  // Every bag gets a position, as far as there are enough, and the last one all that are left.
  const int64_t most = max(capacity, 0);
  for (int64_t i = threadIdx.x; i < size; i += kThreads)
    offsets[i] = static_cast<int32_t>(i + 1 == size && size > 1 ? most : min(i, most));
}

}  // namespace

Status EnterBagOffsets(cudaStream_t stream, const BagOffsetsCall& call) {
  const bool refuses = call.mode == "raise" || call.mode == "mark";
  Arrays arrays;
  arrays.all = static_cast<int64_t>(call.arrays.size());
  for (size_t first = 0; first < call.arrays.size(); first += kMostArrays) {
    const size_t count = std::min(kMostArrays, call.arrays.size() - first);
    std::copy_n(call.arrays.begin() + static_cast<std::ptrdiff_t>(first), count, arrays.of);
    arrays.count = static_cast<int64_t>(count);
    arrays.first = static_cast<int64_t>(first);
    JAX_TT_RETURN_IF_ERROR(Launch(stream, call.examples * arrays.count, kThreads, SharedBytes<int32_t>(kWarps), Enter,
                                  arrays, call.capacities, refuses, call.refused));
  }
  return {};
}

}  // namespace jax_tt
