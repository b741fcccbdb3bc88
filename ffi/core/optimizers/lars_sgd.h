// LARS: m = momentum m + lr a (g + wd w) with a = eta |w| / (|g| + wd |w|) of the row; w -= m.
#pragma once

#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct LarsSgd {
  static constexpr int kElementSlots = 1, kRowSlots = 0, kSums = 2;
  struct Row {
    C step_size;
  };

  JAX_TT_HYPERPARAMETERS(C, learning_rate, eta, momentum, weight_decay);

  JAX_TT_INLINE void Add(C w, C g, const C*, C* sums) const {
    sums[0] += w * w;
    sums[1] += g * g;
  }
  JAX_TT_INLINE Row RowStep(C, const C* sums, C*) const {
    const C weights = SquareRoot(sums[0]), step = SquareRoot(sums[1]) + weight_decay * weights;
    // A row of zeros would never leave zero; where g is zero, too, the ratio means nothing.
    const bool none = weights == C{0} || step == C{0};
    return {none ? learning_rate : learning_rate * eta * weights / step};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C* velocity) const {
    *velocity = momentum * *velocity + row.step_size * (g + weight_decay * w);
    return w - *velocity;
  }
};

}  // namespace jax_tt
