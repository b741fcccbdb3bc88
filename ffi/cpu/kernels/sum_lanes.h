// Sums over the lanes of several vectors at a time.
#pragma once

namespace jax_tt {

template <int N, int... I>
struct Indices : Indices<N - 1, N - 1, I...> {};
template <int... I>
struct Indices<0, I...> {};

// Where element i of the even (or odd) blocks of two vectors, taken group by group, stands in the pair of them.
static constexpr int BlockIndex(int i, int width, int group, int block, int odd) {
  const int within = (2 * (i % group / block) + odd) * block + i % block, first = i / group * group;
  return within < group ? first + within : width + first + within - group;
}

// Sums of neighbouring blocks: those of a, then those of b, in each group.
template <int W, int kGroup, int kBlock, typename V, int... I>
static inline __attribute__((always_inline)) V AddNeighbours(V a, V b, Indices<0, I...>) {
  return __builtin_shufflevector(a, b, BlockIndex(I, W, kGroup, kBlock, 0)...) +
         __builtin_shufflevector(a, b, BlockIndex(I, W, kGroup, kBlock, 1)...);
}

// acc[0] = the sums over the lanes of acc[0], .., acc[kCount - 1]; first within 128 bits, where shuffles are cheap.
template <int W, int kLane, int kCount, typename V>
static inline __attribute__((always_inline)) void SumLanes(V* acc) {
  if constexpr (kCount > 1) {
    constexpr bool kWithin = kCount * kLane > W;
#pragma GCC unroll 8
    for (int l = 0; l < kCount / 2; ++l)
      acc[l] = AddNeighbours<W, kWithin ? kLane : W, kWithin ? 1 : kLane>(acc[2 * l], acc[2 * l + 1], Indices<W>{});
    SumLanes<W, kLane, kCount / 2>(acc);
  }
}

}  // namespace jax_tt
