// The products of the specialised passes in float32, by fused multiply-adds of one thread each.
//
// A thread holds 64 sums where there are enough of them (8 x 8 of a matrix), so that shared memory is read four times
// less often than a multiply-add is made.  Where a product has fewer than that many per thread, neighbouring lanes
// divide the inner dimension among them and add up at the end.
#ifndef JAX_TT_CUDA_TT_FAST_FMA_H_
#define JAX_TT_CUDA_TT_FAST_FMA_H_

#include "ffi/cuda/simt.h"
#include "ffi/cuda/tt_fast_lanes.h"

namespace jax_tt {

struct Fma {
  using Operand = float;
  static constexpr bool kInPlace = true;  // the gradient of the product takes the place of the product

  // Distances between rows in shared memory, chosen against bank conflicts.
  template <typename Tile>
  struct Lead {
    static constexpr int kSplit = Tile::kThreads / Tile::kRank;  // lanes that share the sums of d L
    static constexpr int kLeft = Tile::kRank + 4;
    static constexpr int kSlice = Tile::kColumns + 4 * kSplit;
    static constexpr int kProduct = kSlice, kProductGradient = kSlice;
  };
  __device__ static __forceinline__ void Store(Shared<float> p, float4 value) { Store4(p, value); }

  // Of loads under way in a product.  At rank 64 the sums of the slice's gradient leave registers for one only.
  template <typename Tile>
  static constexpr int kRounds = Tile::kRank == 64 ? 1 : 2;

  // x = l g
  template <typename Tile>
  __device__ static __forceinline__ void MakeProduct(Shared<const float> l, Shared<const float> g, Shared<float> x) {
    using At = Lead<Tile>;
    constexpr int kAcross = Tile::kColumns / 64, kDown = Tile::kWarps / kAcross;  // warps, of 4 x 8 lanes
    constexpr int kM = Tile::kLines / (4 * kDown), kStride = 4 * kDown, kHalf = Tile::kColumns / 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n = (warp % kAcross * 8 + lane % 8) * 4, m = warp / kAcross * 4 + lane / 8;
    float sums[kM][8] = {};
    l = l + m * At::kLeft;
    g = g + n;
    JAX_TT_UNROLL_BY(kRounds<Tile>)
    for (int k = 0; k < Tile::kRank; k += 4) {
      float4 left[kM];
      JAX_TT_UNROLL
      for (int i = 0; i < kM; ++i) left[i] = Load4(l + (i * kStride * At::kLeft + k));
      JAX_TT_UNROLL
      for (int step = 0; step < 4; ++step) {
        const float4 low = Load4(g + (k + step) * At::kSlice), high = Load4(g + ((k + step) * At::kSlice + kHalf));
        JAX_TT_UNROLL
        for (int i = 0; i < kM; ++i) {
          const float value = Element(left[i], step);
          AddScaled(value, low, sums[i]);
          AddScaled(value, high, sums[i] + 4);
        }
      }
    }
    JAX_TT_UNROLL
    for (int i = 0; i < kM; ++i) {
      Store4(x + ((m + i * kStride) * At::kProduct + n), MakeFloat4(sums[i]));
      Store4(x + ((m + i * kStride) * At::kProduct + n + kHalf), MakeFloat4(sums[i] + 4));
    }
  }

  // fn(m, k, value) for every element of dx g^T, each by one thread.
  template <typename Tile, typename Fn>
  __device__ static __forceinline__ void LeftGradient(Shared<const float> dx, Shared<const float> g, Fn fn) {
    using At = Lead<Tile>;
    constexpr int kM = 8, kSplit = At::kSplit, kStrideM = Tile::kLines / kM, kStrideK = Tile::kRank / 8;
    const int part = threadIdx.x % kSplit, thread = threadIdx.x / kSplit;
    const int k = thread % kStrideK, m = thread / kStrideK;
    float sums[kM * 8] = {};
    dx = dx + (m * At::kProductGradient + 4 * part);
    g = g + (k * At::kSlice + 4 * part);
    JAX_TT_UNROLL_BY(1)
    for (int n = 0; n < Tile::kColumns; n += 4 * kSplit) {
      float4 left[kM];
      JAX_TT_UNROLL
      for (int i = 0; i < kM; ++i) left[i] = Load4(dx + (i * kStrideM * At::kProductGradient + n));
      JAX_TT_UNROLL
      for (int j = 0; j < 8; ++j) {
        const float4 right = Load4(g + (j * kStrideK * At::kSlice + n));
        JAX_TT_UNROLL
        for (int i = 0; i < kM; ++i) sums[i * 8 + j] = AddDot(left[i], right, sums[i * 8 + j]);
      }
    }
    ScatterSums<kM * 8, kSplit, 1>(sums, part);
    JAX_TT_UNROLL
    for (int e = 0; e < kM * 8 / kSplit; ++e) {
      const int i = part * (kM / kSplit) + e / 8, j = e % 8;
      fn(m + i * kStrideM, k + j * kStrideK, sums[e]);
    }
  }

  // The sum of l^T dx over the tiles of a part, in registers.
  template <typename Tile>
  class SliceGradient {
    // Threads of 4 or 8 rows by 4 or 8 columns, as many as there are; 8 lanes across.
    static constexpr int kPerThread = Tile::kRank * Tile::kColumns / Tile::kThreads;
    static constexpr int kK = kPerThread >= 64 ? 8 : 4, kN = kPerThread >= 32 ? 8 : 4;
    static constexpr int kAcross = Tile::kColumns / kN, kDown = Tile::kRank / kK;  // threads
    static constexpr int kWarpsAcross = kAcross / 8;

   public:
    __device__ __forceinline__ SliceGradient() {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      n_ = (warp % kWarpsAcross * 8 + lane % 8) * 4;
      k_ = (warp / kWarpsAcross * 4 + lane / 8) * 4;
    }
    __device__ __forceinline__ void Clear() {
      JAX_TT_UNROLL
      for (int i = 0; i < kK; ++i) {
        JAX_TT_UNROLL
        for (int j = 0; j < kN; ++j) sums_[i][j] = 0;
      }
    }
    __device__ __forceinline__ void Add(Shared<const float> l, Shared<const float> dx) {
      using At = Lead<Tile>;
      if (!Works()) return;
      l = l + k_;
      dx = dx + n_;
      JAX_TT_UNROLL_BY(4)
      for (int m = 0; m < Tile::kLines; ++m) {
        float4 left[kK / 4], right[kN / 4];
        JAX_TT_UNROLL
        for (int i = 0; i < kK / 4; ++i) left[i] = Load4(l + (m * At::kLeft + i * (4 * kDown)));
        JAX_TT_UNROLL
        for (int j = 0; j < kN / 4; ++j) right[j] = Load4(dx + (m * At::kProduct + j * (4 * kAcross)));
        JAX_TT_UNROLL
        for (int i = 0; i < kK; ++i) {
          JAX_TT_UNROLL
          for (int j = 0; j < kN / 4; ++j) AddScaled(Element(left[i / 4], i % 4), right[j], sums_[i] + 4 * j);
        }
      }
    }
    // fn(k, n, float4) with the four at and after n, each by one thread.
    template <typename Fn>
    __device__ __forceinline__ void ForEachAcross(Fn fn) const {
      if (!Works()) return;
      JAX_TT_UNROLL
      for (int i = 0; i < kK; ++i) {
        JAX_TT_UNROLL
        for (int j = 0; j < kN / 4; ++j)
          fn(k_ + i % 4 + i / 4 * (4 * kDown), n_ + j * (4 * kAcross), MakeFloat4(sums_[i] + 4 * j));
      }
    }
    // The same with the four at and after k.
    template <typename Fn>
    __device__ __forceinline__ void ForEachDown(Fn fn) const {
      if (!Works()) return;
      JAX_TT_UNROLL
      for (int i = 0; i < kK; i += 4) {
        JAX_TT_UNROLL
        for (int j = 0; j < kN; ++j)
          fn(k_ + i * kDown, n_ + j % 4 + j / 4 * (4 * kAcross),
             make_float4(sums_[i][j], sums_[i + 1][j], sums_[i + 2][j], sums_[i + 3][j]));
      }
    }

   private:
    __device__ __forceinline__ bool Works() const { return kAcross * kDown == Tile::kThreads || k_ < Tile::kRank; }

    int n_, k_;
    float sums_[kK][kN];
  };
};

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_FAST_FMA_H_
