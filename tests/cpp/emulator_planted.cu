// Kernels with one bug each, which a GPU would run without a word.  The emulator must name every one, in any order.
#include <string>
#include <vector>

#include "ffi/cuda/simt.h"
#include "tests/cpp/emulator_test.h"

namespace jax_tt {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kThreads = 64;

// An array of one zero per thread, and a barrier after it was written.
__device__ Shared<int> Zeros(SharedArena& arena) {
  Shared<int> zeros = arena.Take<int>(blockDim.x);
  zeros[threadIdx.x] = 0;
  __syncthreads();
  return zeros;
}

// Races.

__global__ void MissingBarrier(int* out) {
  SharedArena arena;
  Shared<int> slots = Zeros(arena);
  slots[threadIdx.x] = 1;  // the next line needs a barrier before it
  out[threadIdx.x] = slots[(threadIdx.x + 1) % blockDim.x];
}

__global__ void MissingBarrierInReduction(int* out) {
  SharedArena arena;
  Shared<int> sums = Zeros(arena);
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    // the barrier belongs here
  }
  if (threadIdx.x == 0) *out = sums[0];
}

__global__ void OverwrittenTooEarly(int* out) {
  SharedArena arena;
  Shared<int> slots = Zeros(arena);
  for (int i = 0; i < 3; ++i) {
    out[threadIdx.x] += slots[(threadIdx.x + 32) % blockDim.x];
    slots[threadIdx.x] = i;  // others may still read the old value
    __syncthreads();
  }
}

__global__ void ManyWriters(int*) {
  SharedArena arena;
  Shared<int> slot = arena.Take<int>(1);
  slot[0] = static_cast<int>(threadIdx.x);
}

__global__ void MissingSyncwarp(int* out) {
  SharedArena arena;
  Shared<int> slots = Zeros(arena);
  slots[threadIdx.x] = 1;
  out[threadIdx.x] = slots[threadIdx.x ^ 1];
}

__global__ void SyncwarpBetweenWarps(int* out) {
  SharedArena arena;
  Shared<int> slots = Zeros(arena);
  slots[threadIdx.x] = 1;
  __syncwarp();
  out[threadIdx.x] = slots[threadIdx.x ^ 32];
}

__global__ void SyncwarpOfTheOtherHalf(int* out) {
  SharedArena arena;
  Shared<int> slots = Zeros(arena);
  slots[threadIdx.x] = 1;
  __syncwarp(threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u);
  out[threadIdx.x] = slots[threadIdx.x ^ 16];
}

__global__ void PlainAndAtomic(int*) {
  SharedArena arena;
  Shared<int> slots = Zeros(arena);
  if (threadIdx.x == 40) {
    slots[0] += 1;
  } else {
    atomicAdd(slots, 1);
  }
}

__global__ void ReadAmongAtomics(int* out) {
  SharedArena arena;
  Shared<int> slots = Zeros(arena);
  atomicAdd(slots, 1);
  out[threadIdx.x] = slots[0];
}

// Bounds.

__global__ void WriteOutOfBounds(int*) {
  SharedArena arena;
  Shared<int> slots = arena.Take<int>(blockDim.x - 1);
  Shared<int> more = arena.Take<int>(8);  // what a GPU would write to
  if (threadIdx.x < 8) more[threadIdx.x] = 0;
  slots[threadIdx.x] = 1;
}

__global__ void ReadBeforeTheStart(int* out) {
  SharedArena arena;
  Shared<const int> slots = Zeros(arena);
  out[threadIdx.x] = slots[static_cast<int>(threadIdx.x) - 1];
}

__global__ void WidePastTheEnd(int* out) {
  SharedArena arena;
  Shared<float> quads = arena.Take<float>(4 * blockDim.x - 1);
  Store4(quads + 4 * threadIdx.x, make_float4(0, 0, 0, 0));
  *out = 0;
}

__global__ void Misaligned(int*) {
  SharedArena arena;
  Shared<float> quads = arena.Take<float>(4 * blockDim.x + 4);
  Store4(quads + 4 * threadIdx.x + 1, make_float4(0, 0, 0, 0));
}

__global__ void NullPointer(int*) {
  Shared<int> nothing = nullptr;
  nothing[0] = 1;
}

__global__ void MoreThanLaunched(int*) {
  SharedArena arena;
  arena.Take<int>(blockDim.x);
  arena.Take<int>(2 * blockDim.x);
}

__global__ void DifferentTakes(int*) {
  SharedArena arena;
  arena.Take<int>(threadIdx.x == 7 ? 4 : 8);
}

// Uninitialised memory.

__global__ void ReadUninitialised(int* out) {
  SharedArena arena;
  Shared<int> slots = arena.Take<int>(blockDim.x);
  if (threadIdx.x != 50) slots[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = slots[threadIdx.x ^ 1];
}

__global__ void CountUninitialised(int*) {
  SharedArena arena;
  atomicAdd(arena.Take<int>(1), 1);
}

// One block writes what both read: shared memory does not live on.
__global__ void LeftByAnotherBlock(int* out) {
  SharedArena arena;
  Shared<int> slots = arena.Take<int>(blockDim.x);
  if (atomicAdd(out, 1) < static_cast<int>(blockDim.x)) slots[threadIdx.x] = 1;
  __syncthreads();
  atomicAdd(out + 1, slots[threadIdx.x]);
}

// Barriers and collectives.

__global__ void DivergentBarrier(int*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void BarrierAfterExit(int*) {
  if (threadIdx.x == 13) return;
  __syncthreads();
}

__global__ void UnevenBarriers(int*) {
  for (unsigned i = 0; i < 2 + threadIdx.x / 32; ++i) __syncthreads();
}

__global__ void BarrierAgainstShuffle(int* out) {
  if (threadIdx.x == 3) __syncthreads();
  *out = __shfl_sync(kAll, 1, 0);
  if (threadIdx.x != 3) __syncthreads();
}

__global__ void HalfAtBarrier(int* out) {
  if (threadIdx.x % 32 < 16) {
    *out = __any_sync(kAll, 1);
  } else {
    __syncthreads();
  }
}

__global__ void MaskNamesEndedLane(int* out) {
  if (threadIdx.x % 32 == 9) return;
  *out = __shfl_xor_sync(kAll, 1, 1);
}

__global__ void MaskNamesLaneElsewhere(int* out) {
  const bool upper = threadIdx.x % 32 >= 16;
  *out = upper ? __ballot_sync(0xffff0000u, 1) : __any_sync(kAll, 1);
}

__global__ void MaskWithoutSelf(int* out) { *out = __any_sync(0xfffeu, 1); }

__global__ void MaskBeyondBlock(int*) { __syncwarp(); }

__global__ void ShuffleFromOutside(int* out) {
  if (threadIdx.x % 32 < 16) *out = __shfl_sync(0xffffu, 1, 20);
}

__global__ void OddWidth(int* out) { *out = __shfl_down_sync(kAll, 1, 1, 12); }

// `kBlocks` blocks of kKernel with room for one int per thread and some more.
template <void (*kKernel)(int*), int kBlocks = 1, int kBlockThreads = kThreads>
std::string Run() {
  std::vector<int> out(kBlockThreads);
  const size_t shared = SharedBytes<float>(4 * kThreads + 4);
  return Launch(nullptr, kBlocks, kBlockThreads, kKernel == MoreThanLaunched ? 512 : shared, kKernel, out.data())
      .message;
}

__global__ void WritePastTheEnd(int* out) { out[threadIdx.x + 1] = 1; }

__global__ void Nothing(int*) {}

std::string TooManyThreads() { return Launch(nullptr, 1, 1025, 0, Nothing, static_cast<int*>(nullptr)).message; }
std::string TooMuchShared() {
  return Launch(nullptr, 1, 32, 227 * 1024 + 1, Nothing, static_cast<int*>(nullptr)).message;
}

}  // namespace

std::string OverflowGlobal() { return Run<WritePastTheEnd>(); }

const EmulatorCase kPlantedCases[] = {
    {"missing_barrier", Run<MissingBarrier>},
    {"missing_barrier_in_reduction", Run<MissingBarrierInReduction>},
    {"overwritten_too_early", Run<OverwrittenTooEarly>},
    {"many_writers", Run<ManyWriters>},
    {"missing_syncwarp", Run<MissingSyncwarp>},
    {"syncwarp_between_warps", Run<SyncwarpBetweenWarps>},
    {"syncwarp_of_the_other_half", Run<SyncwarpOfTheOtherHalf>},
    {"plain_and_atomic", Run<PlainAndAtomic>},
    {"read_among_atomics", Run<ReadAmongAtomics>},
    {"write_out_of_bounds", Run<WriteOutOfBounds>},
    {"read_before_the_start", Run<ReadBeforeTheStart>},
    {"wide_past_the_end", Run<WidePastTheEnd>},
    {"misaligned", Run<Misaligned>},
    {"null_pointer", Run<NullPointer>},
    {"more_than_launched", Run<MoreThanLaunched>},
    {"different_takes", Run<DifferentTakes>},
    {"read_uninitialised", Run<ReadUninitialised>},
    {"count_uninitialised", Run<CountUninitialised>},
    {"left_by_another_block", Run<LeftByAnotherBlock, 2>},
    {"divergent_barrier", Run<DivergentBarrier>},
    {"barrier_after_exit", Run<BarrierAfterExit>},
    {"uneven_barriers", Run<UnevenBarriers>},
    {"barrier_against_shuffle", Run<BarrierAgainstShuffle>},
    {"half_at_barrier", Run<HalfAtBarrier>},
    {"mask_names_ended_lane", Run<MaskNamesEndedLane>},
    {"mask_names_lane_elsewhere", Run<MaskNamesLaneElsewhere>},
    {"mask_without_self", Run<MaskWithoutSelf>},
    {"mask_beyond_block", Run<MaskBeyondBlock, 1, 48>},
    {"shuffle_from_outside", Run<ShuffleFromOutside>},
    {"odd_width", Run<OddWidth>},
    {"too_many_threads", TooManyThreads},
    {"too_much_shared", TooMuchShared},
};
const int kNumPlantedCases = sizeof(kPlantedCases) / sizeof(kPlantedCases[0]);

}  // namespace jax_tt
