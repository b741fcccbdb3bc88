// Adam: m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr (m / c1) / (sqrt(v / c2) + eps), c = 1 - b^t.
#pragma once

#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct Adam {
  static constexpr int kElementSlots = 2, kRowSlots = 0, kSums = 0;
  struct Row {};

  JAX_TT_HYPERPARAMETERS(C, learning_rate, b1, b2, eps, correction1, correction2);

  JAX_TT_INLINE C Step(C w, C g, const Row&, C* moments) const {
    const C m = b1 * moments[0] + (C{1} - b1) * g;
    const C v = b2 * moments[1] + (C{1} - b2) * g * g;
    moments[0] = m;
    moments[1] = v;
    const C root = SquareRoot(v / correction2) + eps;
    // Nothing but zero gradients yet: 0 / 0 when eps is zero.
    return root == C{0} ? w : w - learning_rate * (m / correction1) / root;
  }
};

}  // namespace jax_tt
