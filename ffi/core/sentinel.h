// The sentinel of a fused table, which only overwriting keeps at 1.
#pragma once

#include "ffi/core/host_device.h"

namespace jax_tt {

// Averages of ones round by less, one step of Adam at a learning rate of 1e-4 moves it by more. The same number as
// jax_tt._base.sentinel.TOLERANCE.
constexpr float kSentinelTolerance = 1.0f / (1 << 14);

// False for NaN.
JAX_TT_INLINE bool SentinelHolds(float sentinel) {
  const float moved = sentinel - 1.0f;
  return moved <= kSentinelTolerance && moved >= -kSentinelTolerance;
}

}  // namespace jax_tt
