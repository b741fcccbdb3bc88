// Kernels of hash tables, chosen at run time as those of kernels.h are.
#pragma once

#include <stdint.h>

#include "ffi/core/hash.h"

namespace jax_tt {

constexpr int64_t kInitialPart = 64;

// Elements of initial rows: a distribution, a seed and a factor.
struct InitialValues {
  const int32_t* quantiles;  // [kQuantiles]
  uint32_t seed[2];
  float scale;
  bool with_sign;
};

struct HashKernels {
  // slots[n]: slot of each key, uint32 [n, 2], or -1 where it is not in the directory or the position is not present.
  void (*find)(const HashDirectory& directory, const uint32_t* keys, const bool* present, int64_t n, int32_t* slots);
  // out[count]: the elements from `begin` on, which is even, of the initial row of a key; count <= kInitialPart.
  void (*initial_part)(const InitialValues& values, uint64_t key, int64_t begin, int64_t count, float* out);
};

const HashKernels& GetHashKernels();

#define JAX_TT_DECLARE_KERNELS(isa) \
  namespace isa {                   \
  extern const HashKernels kHash;   \
  }
JAX_TT_DECLARE_KERNELS(baseline)
JAX_TT_DECLARE_KERNELS(x86_64_v3)
JAX_TT_DECLARE_KERNELS(x86_64_v4)
#undef JAX_TT_DECLARE_KERNELS

}  // namespace jax_tt
