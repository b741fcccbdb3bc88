// Row-wise Adagrad: s += mean(g^2) over the row; w -= lr g / (sqrt(s) + eps).
#pragma once

#include "ffi/core/optimizers/row_math.h"
#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct RowWiseAdagrad {
  static constexpr int kElementSlots = 0, kRowSlots = 1, kSums = 1;
  struct Row {
    C step_size;
  };

  JAX_TT_HYPERPARAMETERS(C, learning_rate, eps);

  JAX_TT_INLINE void Add(C, C g, const C*, C* sums) const { sums[0] += g * g; }
  JAX_TT_INLINE Row RowStep(C width, const C* sums, C* sum) const {
    const C s = *sum + Mean(sums[0], width);
    *sum = s;
    return {s == C{0} ? C{0} : learning_rate / (SquareRoot(s) + eps)};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C*) const { return w - row.step_size * g; }
};

}  // namespace jax_tt
