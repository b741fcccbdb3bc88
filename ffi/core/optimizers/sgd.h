// Stochastic gradient descent: w -= lr g.
#pragma once

#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct Sgd {
  static constexpr int kElementSlots = 0, kRowSlots = 0, kSums = 0;
  struct Row {};

  JAX_TT_HYPERPARAMETERS(C, learning_rate);

  JAX_TT_INLINE C Step(C w, C g, const Row&, C*) const { return w - learning_rate * g; }
};

}  // namespace jax_tt
