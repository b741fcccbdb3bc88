// The vectors of bags in memory.
#pragma once

#include "ffi/cuda/dense/lanes.h"

namespace jax_tt {

// V elements of a vector, which may lie at any place where `aligned` is false.
template <int V>
__device__ __forceinline__ Packet<float, V> LoadVector(const float* from, bool aligned) {
  if constexpr (V > 1)
    if (aligned) return LoadPacket<V>(from);
  Packet<float, V> value;
  for (int v = 0; v < V; ++v) value.x[v] = from[v];
  return value;
}
template <int V>
__device__ __forceinline__ void StoreVector(const Packet<float, V>& value, float* to, bool aligned) {
  if constexpr (V > 1)
    if (aligned) return StorePacket(value, to);
  for (int v = 0; v < V; ++v) to[v] = value.x[v];
}

}  // namespace jax_tt
