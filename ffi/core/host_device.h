// Marks functions that the host compiler and the CUDA compiler both build.
//
// Always inlined: the host compiles them once per instruction set, and a copy that is not inlined could be linked
// into code for an older processor.
#pragma once

#if defined(__CUDACC__)
#define JAX_TT_INLINE __host__ __device__ __forceinline__
#else
#define JAX_TT_INLINE inline __attribute__((always_inline))
#endif

#include <math.h>

namespace jax_tt {

// The functions of C, not those of std, which could be compiled out of line.
JAX_TT_INLINE float Power(float x, float exponent) { return ::powf(x, exponent); }
JAX_TT_INLINE double Power(double x, double exponent) { return ::pow(x, exponent); }
JAX_TT_INLINE float Exponential(float x) { return ::expf(x); }
JAX_TT_INLINE double Exponential(double x) { return ::exp(x); }
JAX_TT_INLINE float ExponentialMinusOne(float x) { return ::expm1f(x); }
JAX_TT_INLINE double ExponentialMinusOne(double x) { return ::expm1(x); }
JAX_TT_INLINE float SquareRoot(float x) { return __builtin_sqrtf(x); }
JAX_TT_INLINE double SquareRoot(double x) { return __builtin_sqrt(x); }

template <typename C>
JAX_TT_INLINE C Clip(C x, C low, C high) {
  return x < low ? low : x > high ? high : x;
}

}  // namespace jax_tt
