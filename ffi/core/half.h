// 16-bit storage types and their rounding.  Arithmetic is always done in float.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "ffi/core/host_device.h"

namespace jax_tt {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

JAX_TT_INLINE float BitsToFloat(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
JAX_TT_INLINE uint32_t FloatToBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

JAX_TT_INLINE float ToCompute(float value) { return value; }
JAX_TT_INLINE double ToCompute(double value) { return value; }
JAX_TT_INLINE float ToCompute(bfloat16 value) { return BitsToFloat(static_cast<uint32_t>(value.bits) << 16); }
JAX_TT_INLINE float ToCompute(float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu, mantissa = value.bits & 0x3ffu;
  if (exponent == 0) {  // zero and subnormals: mantissa units of 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  if (exponent == 31) return BitsToFloat(sign | 0x7f800000u | mantissa << 13);
  return BitsToFloat(sign | (exponent + 112) << 23 | mantissa << 13);
}

// Rounds `value` to a storage type.  `random` holds 32 fresh random bits for stochastic rounding; nearest-even uses
// none.
JAX_TT_INLINE void Round(float value, float* out) { *out = value; }
JAX_TT_INLINE void Round(double value, double* out) { *out = value; }
JAX_TT_INLINE void Round(float value, bfloat16* out) {
  const uint32_t bits = FloatToBits(value);
  out->bits =
      static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
JAX_TT_INLINE void Round(float value, float16* out) {
  const uint32_t bits = FloatToBits(value), sign = (bits >> 16) & 0x8000u;
  const float magnitude = fabsf(value);
  if (value != value) {
    out->bits = static_cast<uint16_t>(sign | 0x7e00u);
  } else if (magnitude >= 65520.0f) {
    out->bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (magnitude < 0x1p-14f) {  // adding 0.5 aligns the units of 2^-24 with the last bits and rounds
    out->bits = static_cast<uint16_t>(sign | (FloatToBits(magnitude + 0.5f) & 0x7ffu));
  } else {
    const uint32_t rounded = (bits & 0x7fffffffu) - (112u << 23) + 0xfffu + ((bits >> 13) & 1u);
    out->bits = static_cast<uint16_t>(sign | rounded >> 13);
  }
}

JAX_TT_INLINE void RoundStochastic(float value, uint32_t, float* out) { *out = value; }
JAX_TT_INLINE void RoundStochastic(double value, uint32_t, double* out) { *out = value; }
JAX_TT_INLINE void RoundStochastic(float value, uint32_t random, bfloat16* out) {
  const uint32_t bits = FloatToBits(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return Round(value, out);  // infinities and NaN stay what they are
  out->bits = static_cast<uint16_t>((bits + (random & 0xffffu)) >> 16);
}
JAX_TT_INLINE void RoundStochastic(float value, uint32_t random, float16* out) {
  const uint32_t bits = FloatToBits(value), sign = (bits >> 16) & 0x8000u;
  const float magnitude = fabsf(value);
  if (!(magnitude < 65504.0f)) return Round(value, out);
  if (magnitude < 0x1p-14f) {
    const float units = magnitude * 0x1p24f + static_cast<float>(random >> 8) * 0x1p-24f;
    out->bits = static_cast<uint16_t>(sign | static_cast<uint32_t>(units));
  } else {
    const uint32_t shifted = (bits & 0x7fffffffu) - (112u << 23) + (random & 0x1fffu);
    out->bits = static_cast<uint16_t>(sign | shifted >> 13);
  }
}

template <typename T>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};

}  // namespace jax_tt
