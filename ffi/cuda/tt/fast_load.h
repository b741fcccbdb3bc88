// Vector loads of stored values, and loops that are laid out flat.
#pragma once

#include <string.h>

#include "ffi/core/half.h"
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

// threadIdx.x, read anew.  What follows from threadIdx.x itself the compiler finds before all loops, and keeps in
// registers that the products need.
__device__ __forceinline__ int ThreadHere() {
#if defined(__CUDACC__) && !defined(JAX_TT_EMULATION)
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
#else
  return static_cast<int>(threadIdx.x);
#endif
}

// Two values of 16 bits as one word.
template <typename T>
__device__ __forceinline__ uint32_t PackPair(T low, T high) {
  static_assert(sizeof(T) == 2);
  return low.bits | static_cast<uint32_t>(high.bits) << 16;
}

// Neighbours in shared memory, aligned to their size: two floats, and of 16 bits two as a word, or four.
#if defined(JAX_TT_EMULATION)
inline float2 Load2(Shared<const float> p) {
  const float* values = p.Wide<false>(2);
  return {values[0], values[1]};
}
inline void Store2(Shared<float> p, float2 value) { memcpy(p.Wide<true>(2), &value, sizeof(value)); }
template <typename T>
uint32_t LoadPair(Shared<T> p) {
  const T* values = p.template Wide<false>(2);
  return PackPair(values[0], values[1]);
}
template <typename T>
void StoreHalves4(Shared<T> p, const T* values) {
  memcpy(p.template Wide<true>(4), values, 4 * sizeof(T));
}
#else
__device__ __forceinline__ float2 Load2(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ __forceinline__ void Store2(float* p, float2 value) { *reinterpret_cast<float2*>(p) = value; }
template <typename T>
__device__ __forceinline__ uint32_t LoadPair(const T* p) {
  return *reinterpret_cast<const uint32_t*>(p);
}
template <typename T>
__device__ __forceinline__ void StoreHalves4(T* p, const T* values) {
  *reinterpret_cast<uint2*>(p) = make_uint2(PackPair(values[0], values[1]), PackPair(values[2], values[3]));
}
#endif

// Four values that are so far apart.
template <typename T>
__device__ __forceinline__ float4 LoadStored4(const T* p, int distance) {
  return make_float4(ToCompute(p[0]), ToCompute(p[distance]), ToCompute(p[2 * distance]), ToCompute(p[3 * distance]));
}
// Four neighbours in global memory, aligned to their size.
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
