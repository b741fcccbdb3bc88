// Kernels of quantized tables, chosen at run time as those of kernels.h are.
#pragma once

#include <stdint.h>

#include "ffi/core/packed_rows.h"

namespace jax_tt {

// Kernels<float>::sum_bags of the rows of dim numbers that are at bytes rows + at[k], with `first` 0.
using SumPackedBags = void (*)(int64_t dim, const PackedLevels& levels, const uint8_t* rows, const int64_t* at,
                               const float* weight, const int32_t* end, int64_t bags, bool add, float* out,
                               const int64_t* out_at);

struct QuantizedKernels {
  SumPackedBags sum8, sum4, sum3, sum2;

  SumPackedBags sum_bags(int bits) const { return bits == 8 ? sum8 : bits == 4 ? sum4 : bits == 3 ? sum3 : sum2; }
};

const QuantizedKernels& GetQuantizedKernels();

#define JAX_TT_DECLARE_KERNELS(isa)         \
  namespace isa {                           \
  extern const QuantizedKernels kQuantized; \
  }
JAX_TT_DECLARE_KERNELS(baseline)
JAX_TT_DECLARE_KERNELS(x86_64_v3)
JAX_TT_DECLARE_KERNELS(x86_64_v4)
#undef JAX_TT_DECLARE_KERNELS

}  // namespace jax_tt
