// FTRL-proximal: a' = a + g^2; l += u g - (a'^k - a^k) (u / lr) w; w = (clip(l, +-u l1) - l) / ((a'^k + beta) (u / lr)
// + 2 u l2), where u is 1, or lr if the linear term is multiplied by it.
#pragma once

#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct Ftrl {
  static constexpr int kElementSlots = 2, kRowSlots = 0, kSums = 0;
  struct Row {};

  // l1 and 2 l2 are multiplied by the unit.
  JAX_TT_HYPERPARAMETERS(C, learning_rate, unit, unit_over_rate, l1, l2, beta, exponent);

  JAX_TT_INLINE C Step(C w, C g, const Row&, C* slots) const {
    const C before = Root(slots[0]);
    slots[0] += g * g;
    if (learning_rate == C{0}) return w;
    const C now = Root(slots[0]), linear = slots[1] + unit * g - (now - before) * unit_over_rate * w;
    slots[1] = linear;
    const C divisor = (now + beta) * unit_over_rate + l2;
    // Nothing but zero gradients yet: 0 / 0 when nothing regularises.
    return divisor == C{0} ? w : (Clip(linear, -l1, l1) - linear) / divisor;
  }

 private:
  JAX_TT_INLINE C Root(C x) const { return exponent == static_cast<C>(0.5) ? SquareRoot(x) : Power(x, exponent); }
};

}  // namespace jax_tt
