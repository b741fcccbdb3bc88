// Kernels of coded tables, chosen at run time as those of kernels.h are.
#pragma once

#include <stdint.h>

#include "ffi/core/coded_rows.h"

namespace jax_tt {

// Kernels<float>::sum_bags of rows at[k] of the table of these codes, with `first` 0.  unpacked: memory for
// codebooks.unpacked() integers.
using SumCodedBags = void (*)(const Codebooks& codebooks, const uint8_t* codes, const int64_t* at, const float* weight,
                              const int32_t* end, int64_t bags, bool add, float* out, const int64_t* out_at,
                              uint32_t* unpacked);

SumCodedBags GetSumCodedBags();

#define JAX_TT_DECLARE_KERNELS(isa)    \
  namespace isa {                      \
  extern const SumCodedBags kSumCoded; \
  }
JAX_TT_DECLARE_KERNELS(baseline)
JAX_TT_DECLARE_KERNELS(x86_64_v3)
JAX_TT_DECLARE_KERNELS(x86_64_v4)
#undef JAX_TT_DECLARE_KERNELS

}  // namespace jax_tt
