// Elements of initial rows, for the instruction set that it is compiled for.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#pragma once

#include <stdint.h>

#include "ffi/cpu/kernels/hash_kernels.h"

namespace jax_tt {

static void InitialPart(const InitialValues& values, uint64_t key, int64_t begin, int64_t count, float* out) {
  uint32_t high = static_cast<uint32_t>(key >> 32), low = static_cast<uint32_t>(key);
  Threefry(values.seed[0], values.seed[1], &high, &low);
  uint32_t bits[kInitialPart];
  for (int64_t i = 0; i < (count + 1) / 2; ++i) {
    uint32_t first = static_cast<uint32_t>(begin / 2 + i), second = 0;
    Threefry(high, low, &first, &second);
    bits[2 * i] = first;
    bits[2 * i + 1] = second;
  }
  // Two loops over local arrays, which compilers turn into vector instructions.
  int32_t whole[kInitialPart];
  const int32_t* const quantiles = values.quantiles;
  const bool with_sign = values.with_sign;
  const float scale = values.scale;
  for (int64_t i = 0; i < count; ++i) whole[i] = InitialElement(bits[i], quantiles, with_sign);
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(whole[i]) * scale;
}

}  // namespace jax_tt
