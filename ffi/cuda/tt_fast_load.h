// Vector loads of stored values, and loops that are laid out flat.
#ifndef JAX_TT_CUDA_TT_FAST_LOAD_H_
#define JAX_TT_CUDA_TT_FAST_LOAD_H_

#include <string.h>

#include "ffi/common/half.h"
#include "ffi/cuda/simt.h"

// Arrays in registers need loops over them to be unrolled; what other compilers do is all the same to them.
#if defined(__CUDACC__)
#define JAX_TT_PRAGMA(text) _Pragma(#text)
#define JAX_TT_UNROLL JAX_TT_PRAGMA(unroll)
#define JAX_TT_UNROLL_BY(count) JAX_TT_PRAGMA(unroll count)
#else
#define JAX_TT_UNROLL
#define JAX_TT_UNROLL_BY(count)
#endif

namespace jax_tt {

// Four neighbours, aligned to their size.
__device__ __forceinline__ float4 LoadStored4(const float* p) { return Load4(p); }
template <typename T>
__device__ __forceinline__ float4 LoadStored4(const T* p) {
  static_assert(sizeof(T) == 2);
  const uint2 words = *reinterpret_cast<const uint2*>(p);
  T values[4];
  memcpy(values, &words, sizeof(values));
  return make_float4(ToCompute(values[0]), ToCompute(values[1]), ToCompute(values[2]), ToCompute(values[3]));
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_FAST_LOAD_H_
