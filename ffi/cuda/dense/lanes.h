// How a row is dealt to threads, and how its elements are moved.
#pragma once

#include <stdint.h>

#include "ffi/core/exact_sum.h"
#include "ffi/core/half.h"
#include "ffi/core/host_device.h"
#include "ffi/cuda/lanes.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

constexpr int kDenseThreads = 256;

// Blocks for this many threads.
inline int64_t DenseBlocks(int64_t threads) { return (threads + kDenseThreads - 1) / kDenseThreads; }

// V adjacent elements, moved by one instruction.
template <typename T, int V>
struct alignas(sizeof(T) * V) Packet {
  T x[V];
};

template <int V, typename T>
__device__ __forceinline__ Packet<T, V> LoadPacket(const T* from) {
#if defined(JAX_TT_EMULATION)
  CheckAligned(from, sizeof(Packet<T, V>));
#endif
  return *reinterpret_cast<const Packet<T, V>*>(from);
}
template <int V, typename T>
__device__ __forceinline__ void StorePacket(const Packet<T, V>& packet, T* to) {
#if defined(JAX_TT_EMULATION)
  CheckAligned(to, sizeof(packet));
#endif
  *reinterpret_cast<Packet<T, V>*>(to) = packet;
}

// A sum of packets that keeps what rounding would lose.
template <int V>
struct ExactPacketSum {
  Packet<float, V> sum{}, lost{};

  __device__ __forceinline__ void Add(const Packet<float, V>& packet) {
    for (int v = 0; v < V; ++v) AddExactly(packet.x[v], &sum.x[v], &lost.x[v]);
  }
  __device__ __forceinline__ Packet<float, V> Value() const {
    Packet<float, V> value;
    for (int v = 0; v < V; ++v) value.x[v] = ExactSum(sum.x[v], lost.x[v]);
    return value;
  }
};

// The lanes that share a row: a power of two of them, a warp at most, each with V columns at a time.
struct RowLanes {
  int count;

  static JAX_TT_INLINE RowLanes For(int64_t dim, int vector) {
    int lanes = 1;
    while (lanes < 32 && lanes * vector < dim) lanes *= 2;
    return {lanes};
  }
  int64_t blocks(int64_t rows) const { return DenseBlocks(rows * count); }

  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) & (count - 1); }
  // The row of this thread, in this block of all that share the rows.
  __device__ __forceinline__ int64_t row(int64_t block) const {
    return (block * blockDim.x + threadIdx.x) >> (__ffs(count) - 1);
  }
  // Sum over the lanes of a row.  Every lane of the warp must call this.
  __device__ __forceinline__ float Sum(float value) const {
    for (int step = count / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
    return value;
  }
  // What the first lane of the row has.  Every lane of the warp must call this.
  __device__ __forceinline__ float OfFirst(float value) const {
    return __shfl_sync(kAllLanes, value, static_cast<int>(threadIdx.x) % 32 & ~(count - 1));
  }
};

// The sum over the groups of lanes of a team of `warps` warps, a power of two, the first group's first; only that group
// has it.  `words`: V for each thread of the block.  Every thread of the block must call this.
template <int V>
__device__ __forceinline__ Packet<float, V> SumOverTeam(const RowLanes& lanes, int warps, Packet<float, V> sum,
                                                        Shared<float> words) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int v = 0; v < V; ++v) {
    for (int step = lanes.count; step < 32; step *= 2) sum.x[v] += __shfl_xor_sync(kAllLanes, sum.x[v], step);
    words[(warp * V + v) * 32 + lane] = sum.x[v];
  }
  __syncthreads();
  if ((warp & (warps - 1)) == 0)
    for (int v = 0; v < V; ++v)
      for (int other = 1; other < warps; ++other) sum.x[v] += words[((warp + other) * V + v) * 32 + lane];
  __syncthreads();
  return sum;
}

// Whether every row that starts at one of these addresses can be moved in packets of 4.
template <typename... Pointers>
bool FourWide(int64_t dim, const Pointers*... rows) {
  return dim % 4 == 0 && ((reinterpret_cast<uintptr_t>(rows) % (4 * sizeof(*rows)) == 0) && ...);
}

}  // namespace jax_tt
