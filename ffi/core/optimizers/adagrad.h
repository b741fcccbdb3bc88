// Adagrad: s += g^2; w -= lr g / (sqrt(s) + eps).
#pragma once

#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct Adagrad {
  static constexpr int kElementSlots = 1, kRowSlots = 0, kSums = 0;
  struct Row {};

  JAX_TT_HYPERPARAMETERS(C, learning_rate, eps);

  JAX_TT_INLINE C Step(C w, C g, const Row&, C* sum) const {
    const C s = *sum + g * g;
    *sum = s;
    // Untouched by any gradient yet: 0 / 0 when eps is zero.
    return s == C{0} ? w : w - learning_rate * g / (SquareRoot(s) + eps);
  }
};

}  // namespace jax_tt
