// The moments of Adam's relatives, with bias corrections that count the steps of the table.
#pragma once

#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct Moments {
  JAX_TT_HYPERPARAMETERS(C, learning_rate, b1, b2, eps, weight_decay, correction1, correction2);

  JAX_TT_INLINE C First(C first, C g) const { return b1 * first + (C{1} - b1) * g; }
  JAX_TT_INLINE C Second(C second, C g) const { return b2 * second + (C{1} - b2) * g * g; }
  // What the first moment is multiplied by: 1 / (correction1 (sqrt(v / correction2) + eps)).
  JAX_TT_INLINE C Scale(C second) const {
    const C root = SquareRoot(second / correction2) + eps;
    // Nothing but zero gradients yet: 0 / 0 when eps is zero.
    return root == C{0} ? C{0} : C{1} / (correction1 * root);
  }
  // The new element, and its moments.
  JAX_TT_INLINE C AdamStep(C w, C g, C* slots) const {
    slots[0] = First(slots[0], g);
    slots[1] = Second(slots[1], g);
    return w - learning_rate * (slots[0] * Scale(slots[1]) + weight_decay * w);
  }
};

}  // namespace jax_tt
