#include "ffi/cuda/hash/hash.h"
#include "ffi/cuda/lanes.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256, kSetsPerBlock = kThreads / 32;

// A slot of the new directory gets the entry of a slot of the old one, or, with -1, nothing.
struct Move {
  const HashDirectory& before;
  const HashDirectory& after;
  int32_t* source;  // [2 * sets, ways]

  __device__ __forceinline__ void operator()(int64_t old, int64_t set, int64_t way) const {
    const int64_t slot = set * after.ways + way;
    after.SetWordOf(after.keys, set, way, old < 0 ? 0 : before.WordOf(before.keys, old));
    after.SetWordOf(after.scores, set, way, old < 0 ? 0 : before.WordOf(before.scores, old));
    after.touched[slot] = old < 0 ? 0 : before.touched[old];
    source[slot] = static_cast<int32_t>(old);
  }
};

// A warp divides a set in two.  Their keys take the ways from 0 up in the order in which they were.
__global__ void __launch_bounds__(kThreads)
    DivideSets(const __grid_constant__ HashDirectory before, const __grid_constant__ HashDirectory after,
               const __grid_constant__ HashSets sets, int32_t* source) {
  const int64_t set = blockIdx.x * static_cast<int64_t>(kSetsPerBlock) + threadIdx.x / 32;
  if (set >= before.sets) return;
  const int lane = threadIdx.x % 32;
  const unsigned below = (1u << lane) - 1;
  const Move move{before, after, source};
  int64_t count[2] = {0, 0};
  for (int64_t first = 0; first < before.ways; first += 32) {
    const int64_t way = first + lane, slot = set * before.ways + way;
    const bool taken = way < before.ways && before.touched[slot] > 0;
    const uint64_t key = taken ? before.WordOf(before.keys, slot) : 0;
    const auto high = static_cast<uint32_t>(key >> 32), low = static_cast<uint32_t>(key);
    const int64_t own = sets.Of(FirstHash(high, low));
    const int64_t home = own == set || own == set + before.sets ? own : sets.Of(SecondHash(high, low));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool goes = taken && (home >= before.sets) == (half == 1);
      const unsigned all = __ballot_sync(kAllLanes, goes);
      if (goes) move(slot, set + half * before.sets, count[half] + __popc(all & below));
      count[half] += __popc(all);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    for (int64_t way = count[half] + lane; way < before.ways; way += 32) move(-1, set + half * before.sets, way);
}

}  // namespace

int64_t HashDoubleWorkspace(const HashDirectory& before) {
  Workspace workspace(nullptr);
  workspace.Take<int32_t>(2 * before.capacity());
  return workspace.bytes();
}

Status HashDouble(cudaStream_t stream, const HashDirectory& before, const HashDirectory& after,
                  const std::vector<HashGrown>& arrays, void* workspace) {
  int32_t* const source = Workspace(workspace).Take<int32_t>(after.capacity());
  JAX_TT_RETURN_IF_ERROR(Launch(stream, (before.sets + kSetsPerBlock - 1) / kSetsPerBlock, kThreads, 0, DivideSets,
                                before, after, HashSets(after.sets), source));
  for (const HashGrown& array : arrays)
    JAX_TT_RETURN_IF_ERROR(
        HashTake(stream, array.before, array.entry_bytes, {source, after.capacity(), before.capacity()}, array.after));
  return {};
}

}  // namespace jax_tt
