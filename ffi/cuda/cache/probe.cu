#include "ffi/cuda/cache/cache.h"
#include "ffi/cuda/lanes.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;
// The lanes that look one id up.  Each loads kLoads tags, one set of 32 ways in all, before it compares the first.
constexpr int kGroup = 8, kLoads = 4;

template <typename K>
__global__ void __launch_bounds__(kThreads)
    ProbeKeys(const __grid_constant__ CacheShape shape, const K* tags, const K* keys, int64_t n, int32_t* slots) {
  const int64_t i = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / kGroup;
  const int lane = threadIdx.x % kGroup, first_lane = threadIdx.x % 32 - lane;
  const K key = i < n ? keys[i] : K{-1};
  const int64_t home = CacheSetOf(CacheHash(key), shape) * shape.ways;
  int64_t slot = -1;
  for (int64_t first = 0; first < shape.ways; first += kGroup * kLoads) {
    K tag[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int64_t way = first + k * kGroup + lane;
      tag[k] = key >= 0 && way < shape.ways ? tags[home + way] : K{-1};
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const unsigned same = __ballot_sync(kAllLanes, key >= 0 && tag[k] == key) >> first_lane & ((1u << kGroup) - 1);
      if (slot < 0 && same != 0) slot = home + first + k * kGroup + __ffs(static_cast<int>(same)) - 1;
    }
  }
  if (i < n && lane == 0) slots[i] = static_cast<int32_t>(slot);
}

}  // namespace

template <typename K>
Status CacheProbe(cudaStream_t stream, const CacheShape& shape, const K* tags, const K* keys, int64_t n,
                  int32_t* slots) {
  constexpr int kIds = kThreads / kGroup;
  return Launch(stream, (n + kIds - 1) / kIds, kThreads, 0, ProbeKeys<K>, shape, tags, keys, n, slots);
}

template Status CacheProbe(cudaStream_t, const CacheShape&, const int32_t*, const int32_t*, int64_t, int32_t*);
template Status CacheProbe(cudaStream_t, const CacheShape&, const int64_t*, const int64_t*, int64_t, int32_t*);

}  // namespace jax_tt
