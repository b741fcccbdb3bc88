// Adam with weight decay: w -= lr ((m / c1) / (sqrt(v / c2) + eps) + wd w); the moments are those of adam.h.
#pragma once

#include "ffi/core/host_device.h"
#include "ffi/core/optimizers/moments.h"

namespace jax_tt {

template <typename C>
struct DecayedAdam {
  static constexpr int kElementSlots = 2, kRowSlots = 0, kSums = 0;
  struct Row {};

  Moments<C> moments;
  static constexpr const char* kHyperparameters = Moments<C>::kHyperparameters;

  JAX_TT_INLINE C Step(C w, C g, const Row&, C* slots) const { return moments.AdamStep(w, g, slots); }
};

}  // namespace jax_tt
