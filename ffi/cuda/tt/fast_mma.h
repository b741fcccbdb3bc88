// The products of the specialised passes on tensor cores.
//
// A warp has a rectangle of the result, in fragments of 16 x 8 as `mma.h` distributes them.  TF32 takes float32 with
// ten bits of mantissa, which hold every float16 and bfloat16 as they are, and keeps the range of float32.  Float32
// with all its bits is two TF32 values.
#pragma once

#include "ffi/cuda/mma.h"
#include "ffi/cuda/simt.h"
#include "ffi/cuda/tt/fast_load.h"

namespace jax_tt {

// Operands of one step of a product, from shared memory whose rows are `lead` apart, to lane (g, t).  A is the left
// operand, B the right one; "transposed" where the rows in memory are the columns of the operand.
struct TF32Operands {
  using Operand = float;
  using Word = float;
  static constexpr int kStep = 8;
  static constexpr bool kInPlace = true;

  __device__ static __forceinline__ void Store(Shared<float> p, float4 v) {
    Store4(p, make_float4(RoundToTF32(v.x), RoundToTF32(v.y), RoundToTF32(v.z), RoundToTF32(v.w)));
  }
  __device__ static __forceinline__ void LoadA(Shared<const float> p, int lead, int g, int t, float (&a)[4]) {
    a[0] = p[g * lead + t];
    a[1] = p[(g + 8) * lead + t];
    a[2] = p[g * lead + t + 4];
    a[3] = p[(g + 8) * lead + t + 4];
  }
  __device__ static __forceinline__ void LoadATransposed(Shared<const float> p, int lead, int g, int t, float (&a)[4]) {
    a[0] = p[t * lead + g];
    a[1] = p[t * lead + g + 8];
    a[2] = p[(t + 4) * lead + g];
    a[3] = p[(t + 4) * lead + g + 8];
  }
  __device__ static __forceinline__ void LoadB(Shared<const float> p, int lead, int g, int t, float (&b)[2]) {
    b[0] = p[t * lead + g];
    b[1] = p[(t + 4) * lead + g];
  }
  // A and a transposed B that go together: the order of the inner dimension is free, and neighbours are read at once.
  __device__ static __forceinline__ void LoadAOfPair(Shared<const float> p, int lead, int g, int t, float (&a)[4]) {
    const float2 upper = Load2(p + (g * lead + 2 * t)), lower = Load2(p + ((g + 8) * lead + 2 * t));
    a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
  }
  __device__ static __forceinline__ void LoadBTransposed(Shared<const float> p, int lead, int g, int t, float (&b)[2]) {
    const float2 v = Load2(p + (g * lead + 2 * t));
    b[0] = v.x, b[1] = v.y;
  }
  __device__ static __forceinline__ void Multiply(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    MmaTF32(d, a, b);
  }
};

// A float32 as the sum of two TF32 values, with a relative error of at most 2^-22.
struct SplitFloat {
  float large, small;
};

// Three of the four products of large and small values; that of two small ones is below the precision of float32.
struct SplitOperands {
  using Operand = float;
  using Word = SplitFloat;
  static constexpr int kStep = TF32Operands::kStep;
  static constexpr bool kInPlace = true;

  __device__ static __forceinline__ void Store(Shared<float> p, float4 v) { Store4(p, v); }
  __device__ static __forceinline__ void LoadA(Shared<const float> p, int lead, int g, int t, SplitFloat (&a)[4]) {
    Load<4>(TF32Operands::LoadA, p, lead, g, t, a);
  }
  __device__ static __forceinline__ void LoadATransposed(Shared<const float> p, int lead, int g, int t,
                                                         SplitFloat (&a)[4]) {
    Load<4>(TF32Operands::LoadATransposed, p, lead, g, t, a);
  }
  __device__ static __forceinline__ void LoadB(Shared<const float> p, int lead, int g, int t, SplitFloat (&b)[2]) {
    Load<2>(TF32Operands::LoadB, p, lead, g, t, b);
  }
  __device__ static __forceinline__ void LoadAOfPair(Shared<const float> p, int lead, int g, int t,
                                                     SplitFloat (&a)[4]) {
    Load<4>(TF32Operands::LoadAOfPair, p, lead, g, t, a);
  }
  __device__ static __forceinline__ void LoadBTransposed(Shared<const float> p, int lead, int g, int t,
                                                         SplitFloat (&b)[2]) {
    Load<2>(TF32Operands::LoadBTransposed, p, lead, g, t, b);
  }
  // Tensor cores cut sums off, float32 additions round them: only those of one step are made by the former.
  __device__ static __forceinline__ void Multiply(float (&d)[4], const SplitFloat (&a)[4], const SplitFloat (&b)[2]) {
    const float a_large[4] = {a[0].large, a[1].large, a[2].large, a[3].large}, b_large[2] = {b[0].large, b[1].large};
    const float a_small[4] = {a[0].small, a[1].small, a[2].small, a[3].small}, b_small[2] = {b[0].small, b[1].small};
    float sum[4] = {};
    MmaTF32(sum, a_small, b_large);
    MmaTF32(sum, a_large, b_small);
    MmaTF32(sum, a_large, b_large);
    JAX_TT_UNROLL
    for (int i = 0; i < 4; ++i) d[i] += sum[i];
  }

 private:
  template <int kCount>
  __device__ static __forceinline__ void Load(void (*load)(Shared<const float>, int, int, int, float (&)[kCount]),
                                              Shared<const float> p, int lead, int g, int t,
                                              SplitFloat (&words)[kCount]) {
    float values[kCount];
    load(p, lead, g, t, values);
    JAX_TT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      // Rounded as RoundToTF32 does, without its tests for infinities: these become NaN, and NaN stays in the small
      // part. Of that, tensor cores read as many bits as they take.
      const float large = BitsToFloat((FloatToBits(values[i]) + 0x1000u) & ~0x1fffu);
      words[i] = {large, values[i] - large};
    }
  }
};

struct Bfloat16Operands {
  using Operand = bfloat16;
  using Word = uint32_t;
  static constexpr int kStep = 16;
  static constexpr bool kInPlace = false;

  __device__ static __forceinline__ void Store(Shared<bfloat16> p, float4 v) {
    bfloat16 values[4];
    Round(v.x, &values[0]);
    Round(v.y, &values[1]);
    Round(v.z, &values[2]);
    Round(v.w, &values[3]);
    StoreHalves4(p, values);
  }
  __device__ static __forceinline__ void LoadA(Shared<const bfloat16> p, int lead, int g, int t, uint32_t (&a)[4]) {
    a[0] = LoadPair(p + (g * lead + 2 * t));
    a[1] = LoadPair(p + ((g + 8) * lead + 2 * t));
    a[2] = LoadPair(p + (g * lead + 2 * t + 8));
    a[3] = LoadPair(p + ((g + 8) * lead + 2 * t + 8));
  }
  __device__ static __forceinline__ void LoadATransposed(Shared<const bfloat16> p, int lead, int g, int t,
                                                         uint32_t (&a)[4]) {
    a[0] = LoadColumn(p + (2 * t * lead + g), lead);
    a[1] = LoadColumn(p + (2 * t * lead + g + 8), lead);
    a[2] = LoadColumn(p + ((2 * t + 8) * lead + g), lead);
    a[3] = LoadColumn(p + ((2 * t + 8) * lead + g + 8), lead);
  }
  __device__ static __forceinline__ void LoadB(Shared<const bfloat16> p, int lead, int g, int t, uint32_t (&b)[2]) {
    b[0] = LoadColumn(p + (2 * t * lead + g), lead);
    b[1] = LoadColumn(p + ((2 * t + 8) * lead + g), lead);
  }
  __device__ static __forceinline__ void LoadAOfPair(Shared<const bfloat16> p, int lead, int g, int t,
                                                     uint32_t (&a)[4]) {
    LoadA(p, lead, g, t, a);
  }
  __device__ static __forceinline__ void LoadBTransposed(Shared<const bfloat16> p, int lead, int g, int t,
                                                         uint32_t (&b)[2]) {
    b[0] = LoadPair(p + (g * lead + 2 * t));
    b[1] = LoadPair(p + (g * lead + 2 * t + 8));
  }
  __device__ static __forceinline__ void Multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    MmaBfloat16(d, a, b);
  }

 private:
  __device__ static __forceinline__ uint32_t LoadColumn(Shared<const bfloat16> p, int lead) {
    return PackPair(p[0], p[lead]);
  }
};

template <typename Operands>
struct Mma {
  using Operand = typename Operands::Operand;
  using Word = typename Operands::Word;
  static constexpr bool kInPlace = Operands::kInPlace;

  // Distances between rows, against bank conflicts: four or eight words more than a multiple of 32 banks.
  template <typename Tile>
  struct Lead {
    static constexpr int kLeft = Tile::kRank + 8;
    static constexpr int kColumns = Tile::kColumns + 8;  // of the slice, the product and its gradient
  };
  __device__ static __forceinline__ void Store(Shared<Operand> p, float4 value) { Operands::Store(p, value); }

  // The place of a thread: its warp among kAcross by any number, its lane in a fragment.
  template <int kAcross>
  struct Place {
    int across, down, g, t;
    __device__ __forceinline__ Place() : Place(static_cast<unsigned>(ThreadHere())) {}

   private:
    __device__ __forceinline__ explicit Place(unsigned thread)
        : across(thread / 32 % kAcross), down(thread / 32 / kAcross), g(thread % 32 / 4), t(thread % 4) {}
  };

  // sums += a b for the fragments of a warp, one step of the inner dimension: load_a(i, fragment), load_b(j, fragment).
  template <int kM, int kN, typename LoadA, typename LoadB>
  __device__ static __forceinline__ void AddStep(float (&sums)[kM][kN][4], LoadA load_a, LoadB load_b) {
    Word a[kM][4];
    JAX_TT_UNROLL
    for (int i = 0; i < kM; ++i) load_a(i, a[i]);
    JAX_TT_UNROLL
    for (int j = 0; j < kN; ++j) {
      Word b[2];
      load_b(j, b);
      JAX_TT_UNROLL
      for (int i = 0; i < kM; ++i) Operands::Multiply(sums[i][j], a[i], b);
    }
  }

  // x = l g
  template <typename Tile>
  __device__ static __forceinline__ void MakeProduct(Shared<const Operand> l, Shared<const Operand> g,
                                                     Shared<float> x) {
    using At = Lead<Tile>;
    constexpr int kDown = 2, kAcross = Tile::kWarps / kDown;
    constexpr int kM = Tile::kLines / kDown / 16, kN = 4;  // fragments of a warp at a time
    const Place<kAcross> at;
    const int m = at.down * kM * 16;
    JAX_TT_UNROLL_BY(1)
    for (int n = at.across * kN * 8; n < Tile::kColumns; n += kAcross * kN * 8) {
      float sums[kM][kN][4] = {};
      JAX_TT_UNROLL_BY(1)
      for (int k = 0; k < Tile::kRank; k += Operands::kStep)
        AddStep(
            sums,
            [&](int i, Word(&a)[4]) { Operands::LoadA(l + ((m + 16 * i) * At::kLeft + k), At::kLeft, at.g, at.t, a); },
            [&](int j, Word(&b)[2]) {
              Operands::LoadB(g + (k * At::kColumns + n + 8 * j), At::kColumns, at.g, at.t, b);
            });
      JAX_TT_UNROLL
      for (int i = 0; i < kM; ++i) {
        JAX_TT_UNROLL
        for (int j = 0; j < kN; ++j) {
          const Shared<float> to = x + ((m + 16 * i + at.g) * At::kColumns + n + 8 * j + 2 * at.t);
          Store2(to, make_float2(sums[i][j][0], sums[i][j][1]));
          Store2(to + 8 * At::kColumns, make_float2(sums[i][j][2], sums[i][j][3]));
        }
      }
    }
  }

  // fn(m, k, value) for every element of dx g^T, each by one thread.
  template <typename Tile, typename Fn>
  __device__ static __forceinline__ void LeftGradient(Shared<const Operand> dx, Shared<const Operand> g, Fn fn) {
    using At = Lead<Tile>;
    constexpr int kDown = Tile::kRank == 16 ? 4 : 2, kAcross = Tile::kWarps / kDown;
    constexpr int kM = Tile::kLines / kDown / 16, kN = Tile::kRank / kAcross / 8;
    const Place<kAcross> at;
    const int m = at.down * kM * 16, k = at.across * kN * 8;
    float sums[kM][kN][4] = {};
    JAX_TT_UNROLL_BY(2)
    for (int n = 0; n < Tile::kColumns; n += Operands::kStep)
      AddStep(
          sums,
          [&](int i, Word(&a)[4]) {
            Operands::LoadAOfPair(dx + ((m + 16 * i) * At::kColumns + n), At::kColumns, at.g, at.t, a);
          },
          [&](int j, Word(&b)[2]) {
            Operands::LoadBTransposed(g + ((k + 8 * j) * At::kColumns + n), At::kColumns, at.g, at.t, b);
          });
    JAX_TT_UNROLL
    for (int i = 0; i < kM; ++i) {
      JAX_TT_UNROLL
      for (int j = 0; j < kN; ++j) {
        JAX_TT_UNROLL
        for (int e = 0; e < 4; ++e) fn(m + 16 * i + at.g + e / 2 * 8, k + 8 * j + 2 * at.t + e % 2, sums[i][j][e]);
      }
    }
  }

  // The sum of l^T dx over the tiles of a part, in registers.
  template <typename Tile>
  class SliceGradient {
    static constexpr int kDown = Tile::kRank >= 64 ? 2 : 1, kAcross = Tile::kWarps / kDown;
    static constexpr int kM = Tile::kRank / kDown / 16, kN = Tile::kColumns / kAcross / 8;

   public:
    __device__ __forceinline__ void Clear() {
      JAX_TT_UNROLL
      for (int i = 0; i < kM * kN * 4; ++i) sums_[i / (kN * 4)][i / 4 % kN][i % 4] = 0;
    }
    __device__ __forceinline__ void Add(Shared<const Operand> l, Shared<const Operand> dx) {
      using At = Lead<Tile>;
      const Place<kAcross> at;
      JAX_TT_UNROLL_BY(2)
      for (int m = 0; m < Tile::kLines; m += Operands::kStep)
        AddStep(
            sums_,
            [&](int i, Word(&a)[4]) {
              Operands::LoadATransposed(l + (m * At::kLeft + (at.down * kM + i) * 16), At::kLeft, at.g, at.t, a);
            },
            [&](int j, Word(&b)[2]) {
              Operands::LoadB(dx + (m * At::kColumns + (at.across * kN + j) * 8), At::kColumns, at.g, at.t, b);
            });
    }
    // fn(k, n, float2) with the two at and after n, each by one thread.
    template <typename Fn>
    __device__ __forceinline__ void ForEachAcross(Fn fn) const {
      ForEachRow([&](int k, int n, const float* values) { fn(k, n, make_float2(values[0], values[1])); });
    }
    // fn(k, n, float); neighbouring lanes have neighbours down.
    template <typename Fn>
    __device__ __forceinline__ void ForEachDown(Fn fn) const {
      ForEachRow([&](int k, int n, const float* values) {
        fn(k, n, values[0]);
        fn(k, n + 1, values[1]);
      });
    }

   private:
    template <typename Fn>
    __device__ __forceinline__ void ForEachRow(Fn fn) const {
      const Place<kAcross> at;
      JAX_TT_UNROLL
      for (int i = 0; i < kM; ++i) {
        JAX_TT_UNROLL
        for (int j = 0; j < kN; ++j) {
          const int k = (at.down * kM + i) * 16 + at.g, n = (at.across * kN + j) * 8 + 2 * at.t;
          fn(k, n, sums_[i][j]);
          fn(k + 8, n, sums_[i][j] + 2);
        }
      }
    }

    float sums_[kM][kN][4];
  };
};

}  // namespace jax_tt
