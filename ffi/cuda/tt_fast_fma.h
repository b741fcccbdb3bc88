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
    // Of these, lanes that read at the same time read the same row, or neighbours.
    static constexpr int kProduct = Tile::kColumns, kProductGradient = kProduct;
  };
  __device__ static __forceinline__ void Store(Shared<float> p, float4 value) { Store4(p, value); }

  // x = l g
  template <typename Tile>
  __device__ static __forceinline__ void MakeProduct(Shared<const float> l, Shared<const float> g, Shared<float> x) {
    using At = Lead<Tile>;
    constexpr int kAcross = Tile::kColumns / 64, kDown = Tile::kWarps / kAcross;  // warps, of 4 x 8 lanes
    constexpr int kM = Tile::kLines / (4 * kDown), kStride = 4 * kDown, kHalf = Tile::kColumns / 2;
    const unsigned thread = ThreadHere(), lane = thread % 32, warp = thread / 32;
    const int n = (warp % kAcross * 8 + lane % 8) * 4, m = warp / kAcross * 4 + lane / 8;
    float sums[kM][8] = {};
    l = l + m * At::kLeft;
    g = g + n;
    JAX_TT_UNROLL_BY(1)
    for (int k = 0; k < Tile::kRank; k += 2) {
      float2 left[kM];  // vectors of four would take registers that the sums of the slice have
      JAX_TT_UNROLL
      for (int i = 0; i < kM; ++i) left[i] = Load2(l + (i * kStride * At::kLeft + k));
      JAX_TT_UNROLL
      for (int step = 0; step < 2; ++step) {
        const float4 low = Load4(g + (k + step) * At::kSlice), high = Load4(g + ((k + step) * At::kSlice + kHalf));
        JAX_TT_UNROLL
        for (int i = 0; i < kM; ++i) {
          const float value = step == 0 ? left[i].x : left[i].y;
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
    const unsigned thread = ThreadHere();
    const int part = thread % kSplit, k = thread / kSplit % kStrideK, m = thread / kSplit / kStrideK;
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
    __device__ __forceinline__ void Clear() {
      JAX_TT_UNROLL
      for (int i = 0; i < kK; ++i) {
        JAX_TT_UNROLL
        for (int j = 0; j < kN; ++j) sums_[i][j] = 0;
      }
    }
    __device__ __forceinline__ void Add(Shared<const float> l, Shared<const float> dx) {
      using At = Lead<Tile>;
      const Place at;
      if (!at.Works()) return;
      l = l + at.k;
      dx = dx + at.n;
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
      const Place at;
      if (!at.Works()) return;
      JAX_TT_UNROLL
      for (int i = 0; i < kK; ++i) {
        JAX_TT_UNROLL
        for (int j = 0; j < kN / 4; ++j)
          fn(at.k + i % 4 + i / 4 * (4 * kDown), at.n + j * (4 * kAcross), MakeFloat4(sums_[i] + 4 * j));
      }
    }
    // The same with the four at and after k.
    template <typename Fn>
    __device__ __forceinline__ void ForEachDown(Fn fn) const {
      const Place at;
      if (!at.Works()) return;
      JAX_TT_UNROLL
      for (int i = 0; i < kK; i += 4) {
        JAX_TT_UNROLL
        for (int j = 0; j < kN; ++j)
          fn(at.k + i * kDown, at.n + j % 4 + j / 4 * (4 * kAcross),
             make_float4(sums_[i][j], sums_[i + 1][j], sums_[i + 2][j], sums_[i + 3][j]));
      }
    }

   private:
    // The first row and column of a thread.
    struct Place {
      int k, n;
      __device__ __forceinline__ Place() {
        const unsigned thread = ThreadHere(), lane = thread % 32, warp = thread / 32;
        n = (warp % kWarpsAcross * 8 + lane % 8) * 4;
        k = (warp / kWarpsAcross * 4 + lane / 8) * 4;
      }
      __device__ __forceinline__ bool Works() const { return kAcross * kDown == Tile::kThreads || k < Tile::kRank; }
    };

    float sums_[kK][kN];
  };
};

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_FAST_FMA_H_
