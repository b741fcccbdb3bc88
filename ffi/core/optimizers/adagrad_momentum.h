// Adagrad with momentum: a = b2 a + gain g^2; p = (a + eps)^-1/exponent; m = k m + p g; w -= lr m, or with Nesterov's
// momentum w -= lr (k m + p g).
#pragma once

#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct AdagradMomentum {
  static constexpr int kElementSlots = 2, kRowSlots = 0, kSums = 0;
  struct Row {};

  JAX_TT_HYPERPARAMETERS(C, learning_rate, momentum, b2, gain, eps, power, nesterov);

  JAX_TT_INLINE C Step(C w, C g, const Row&, C* slots) const {
    slots[0] = b2 * slots[0] + gain * g * g;
    const C scaled = Preconditioner(slots[0] + eps) * g;
    slots[1] = momentum * slots[1] + scaled;
    return w - learning_rate * (nesterov != C{0} ? momentum * slots[1] + scaled : slots[1]);
  }

 private:
  JAX_TT_INLINE C Preconditioner(C x) const {
    if (x == C{0}) return C{0};  // nothing but zero gradients yet
    return power == static_cast<C>(-0.5) ? C{1} / SquareRoot(x) : Power(x, power);
  }
};

}  // namespace jax_tt
