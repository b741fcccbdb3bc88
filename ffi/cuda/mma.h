// Matrix products of the tensor cores, made by the 32 lanes of a warp together; the emulator has twins of them with
// the same distribution over lanes.
//
// d[16, 8] += a[16, k] b[k, 8].  Lane (g, t) = (lane / 4, lane % 4) has of d the elements (g, 2 t), (g, 2 t + 1),
// (g + 8, 2 t), (g + 8, 2 t + 1), and of the operands
//   TF32, k = 8:      a (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4);  b (t, g), (t + 4, g)
//   bfloat16, k = 16: a the pairs (g, 2 t), (g + 8, 2 t), (g, 2 t + 8), (g + 8, 2 t + 8);  b the pairs (2 t, g), (2 t +
//   8, g)
// where a pair is an element and the next along k.
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "ffi/core/half.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

#if defined(JAX_TT_EMULATION)

// As the hardware rounds: to the nearest, ties away from zero.
inline float RoundToTF32(float value) {
  const uint32_t bits = FloatToBits(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return value;
  return BitsToFloat((bits + 0x1000u) & ~0x1fffu);
}

namespace emulation {

struct MmaLane {
  float a[8], b[4];
};
// What the lanes of this warp bring.  Not thread-local itself: a module has little room for such.
inline MmaLane* MmaLanes() {
  static thread_local const std::unique_ptr<MmaLane[]> lanes(new MmaLane[1024]);
  return lanes.get() + threadIdx.x / 32 * 32;
}

// The sum of terms as tensor cores make it: aligned to the largest exponent, of each term only the 24 bits below it
// count, and of the result the first 24.  What is cut off there is never rounded up.  Some GPUs keep a bit or two more.
template <int kCount>
float SumCutOff(const double (&terms)[kCount]) {
  double largest = 0, sum = 0;
  for (const double term : terms) {
    largest = std::max(largest, std::abs(term));
    sum += term;
  }
  if (!std::isfinite(sum) || largest == 0) return static_cast<float>(sum);
  const int exponent = std::ilogb(largest) - 23;
  int64_t total = 0;
  for (const double term : terms) total += static_cast<int64_t>(std::ldexp(term, -exponent));
  int cut = 0;
  for (; total >> cut >= int64_t{1} << 24 || -total >> cut >= int64_t{1} << 24; ++cut) {
  }
  total = total / (int64_t{1} << cut) * (int64_t{1} << cut);
  return static_cast<float>(std::ldexp(static_cast<double>(total), exponent));
}

// kPair elements of a lane are neighbours along k.
template <int kPair>
void MultiplyLanes(float (&d)[4]) {
  const MmaLane* lanes = MmaLanes();
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) {
      double terms[4 * kPair + 1] = {d[i]};
      for (int k = 0; k < 4; ++k)
        for (int e = 0; e < kPair; ++e)
          terms[1 + k * kPair + e] = double{lanes[4 * g + k].a[(2 * half + i / 2) * kPair + e]} *
                                     lanes[4 * (2 * t + i % 2) + k].b[half * kPair + e];
      d[i] = SumCutOff(terms);
    }
  }
  __syncwarp();
}

}  // namespace emulation

// The operands are rounded already; what is below their ten bits would be cut off.
inline void MmaTF32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  const auto cut = [](float value) { return BitsToFloat(FloatToBits(value) & ~0x1fffu); };
  emulation::MmaLane& lane = emulation::MmaLanes()[threadIdx.x % 32];
  for (int i = 0; i < 4; ++i) lane.a[i] = cut(a[i]);
  for (int i = 0; i < 2; ++i) lane.b[i] = cut(b[i]);
  emulation::MultiplyLanes<1>(d);
}

inline void MmaBfloat16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const auto half = [](uint32_t pair, int e) { return ToCompute(bfloat16{static_cast<uint16_t>(pair >> (16 * e))}); };
  emulation::MmaLane& lane = emulation::MmaLanes()[threadIdx.x % 32];
  for (int i = 0; i < 8; ++i) lane.a[i] = half(a[i / 2], i % 2);
  for (int i = 0; i < 4; ++i) lane.b[i] = half(b[i / 2], i % 2);
  emulation::MultiplyLanes<2>(d);
}

#elif defined(__CUDACC__)

__device__ __forceinline__ float RoundToTF32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}

__device__ __forceinline__ void MmaTF32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

__device__ __forceinline__ void MmaBfloat16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

}  // namespace jax_tt
