// Row-wise RMSProp with automatic regularisation: v = b v + (1 - b) mean(g^2); w = max(low, 1 - clip(lr alpha n, 0, 1))
// w
// - lr g / (sqrt(v) + eps), n being the steps since the row was used.
#pragma once

#include "ffi/core/optimizers/row_counter.h"
#include "ffi/core/optimizers/row_math.h"
#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct RowWiseRmsProp {
  static constexpr int kElementSlots = 0, kRowSlots = 2, kSums = 1;
  struct Row {
    C keep, step_size;
  };

  JAX_TT_HYPERPARAMETERS(C, learning_rate, decay, eps, ar_alpha, min_shrinkage, step);

  JAX_TT_INLINE void Add(C, C g, const C*, C* sums) const { sums[0] += g * g; }
  JAX_TT_INLINE Row RowStep(C width, const C* sums, C* slots) const {
    slots[0] = decay * slots[0] + (C{1} - decay) * Mean(sums[0], width);
    const C lambda = Clip(learning_rate * ar_alpha * Interval(slots[1], step), C{0}, C{1});
    slots[1] = step;
    const C root = SquareRoot(slots[0]) + eps, keep = C{1} - lambda;
    return {keep < min_shrinkage ? min_shrinkage : keep, root == C{0} ? C{0} : learning_rate / root};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C*) const { return row.keep * w - row.step_size * g; }
};

}  // namespace jax_tt
