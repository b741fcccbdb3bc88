// Marks functions that the host compiler and the CUDA compiler both build.
//
// Always inlined: the host compiles them once per instruction set, and a copy that is not inlined could be linked
// into code for an older processor.
#ifndef JAX_TT_CORE_HOST_DEVICE_H_
#define JAX_TT_CORE_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define JAX_TT_INLINE __host__ __device__ __forceinline__
#else
#define JAX_TT_INLINE inline __attribute__((always_inline))
#endif

namespace jax_tt {

JAX_TT_INLINE float SquareRoot(float x) { return __builtin_sqrtf(x); }
JAX_TT_INLINE double SquareRoot(double x) { return __builtin_sqrt(x); }

}  // namespace jax_tt

#endif  // JAX_TT_CORE_HOST_DEVICE_H_
