// How often and when a row was used, in slots of float32.
#pragma once

#include "ffi/core/host_device.h"

namespace jax_tt {

// Steps are counted up to here, the largest number up to which float32 has every integer.
template <typename C>
constexpr C kMostSteps = C{16777216};

template <typename C>
JAX_TT_INLINE C OneMore(C count) {
  return count < kMostSteps<C> ? count + C{1} : kMostSteps<C>;
}

// Steps since the last use of a row; 1 if there was none, and where steps are no longer counted.
template <typename C>
JAX_TT_INLINE C Interval(C last_step, C step) {
  return last_step == C{0} || step - last_step < C{1} ? C{1} : step - last_step;
}

// Uses of a row after one more: all of them, only this one (halflife 0), or with older ones counting less.
template <typename C>
JAX_TT_INLINE C CountUse(C count, C halflife, C interval) {
  if (halflife < C{0}) return OneMore(count);
  if (halflife == C{0}) return C{1};
  return C{1} + Exponential(-interval * static_cast<C>(0.6931471805599453) / halflife) * count;
}

}  // namespace jax_tt
