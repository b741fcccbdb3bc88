// Vectors in registers, and sums over the lanes of a warp.
#pragma once

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/simt.h"
#include "ffi/cuda/tt/fast_load.h"

namespace jax_tt {

__device__ __forceinline__ float Element(const float4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ __forceinline__ float4 MakeFloat4(const float* v) { return make_float4(v[0], v[1], v[2], v[3]); }

// kCount neighbours in shared memory, two or four.
template <int kCount>
__device__ __forceinline__ void LoadValues(Shared<const float> p, float* values) {
  if constexpr (kCount == 4) {
    const float4 v = Load4(p);
    values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
  } else {
    const float2 v = Load2(p);
    values[0] = v.x, values[1] = v.y;
  }
}
__device__ __forceinline__ void StoreValues(float* p, const float4& values) { Store4(p, values); }
__device__ __forceinline__ void StoreValues(float* p, const float2& values) { *reinterpret_cast<float2*>(p) = values; }
__device__ __forceinline__ void StoreValues(float* p, float value) { *p = value; }

// sums += scale * v
__device__ __forceinline__ void AddScaled(float scale, const float4& v, float* sums) {
  sums[0] = fmaf(scale, v.x, sums[0]);
  sums[1] = fmaf(scale, v.y, sums[1]);
  sums[2] = fmaf(scale, v.z, sums[2]);
  sums[3] = fmaf(scale, v.w, sums[3]);
}

// sum + a . b
__device__ __forceinline__ float AddDot(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// What is left for one lane by ScatterSums.
template <int kCount, int kLanes>
constexpr int kScattered = kCount > kLanes ? kCount / kLanes : 1;

// Sums of values[e] over kLanes lanes, the ones kStride apart: lane `own` of them is left with those from
// e = own * kCount / kLanes on, kScattered of them, in values[0] and after; where there are more lanes than sums,
// several lanes are left with the same one.  Half of the sums change sides at every step.
template <int kCount, int kLanes, int kStride>
__device__ __forceinline__ void ScatterSums(float* values, int own) {
  if constexpr (kLanes > 1 && kCount > 1) {
    const bool upper = (own & (kLanes / 2)) != 0;
    JAX_TT_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      const float low = values[i], high = values[i + kCount / 2];
      values[i] = (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, kLanes / 2 * kStride);
    }
    ScatterSums<kCount / 2, kLanes / 2, kStride>(values, own);
  } else if constexpr (kLanes > 1) {
    values[0] += __shfl_xor_sync(kAllLanes, values[0], kLanes / 2 * kStride);
    ScatterSums<1, kLanes / 2, kStride>(values, own);
  }
}

}  // namespace jax_tt
