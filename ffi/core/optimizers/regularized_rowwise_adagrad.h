// Row-wise Adagrad with weight decay and a largest norm: s += mean((g + l2 w)^2); w = (1 - m l2 - lr decay) w - m g
// with m = lr / (sqrt(s) + eps); then w is scaled to the largest norm if it exceeds it.
#pragma once

#include "ffi/core/optimizers/row_math.h"
#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct RegularizedRowWiseAdagrad {
  static constexpr int kElementSlots = 0, kRowSlots = 1, kSums = 4;
  struct Row {
    C keep, step_size;
  };

  JAX_TT_HYPERPARAMETERS(C, learning_rate, eps, l2, decay, max_norm);

  JAX_TT_INLINE void Add(C w, C g, const C*, C* sums) const {
    const C with_penalty = g + l2 * w;
    sums[0] += with_penalty * with_penalty;
    sums[1] += w * w;
    sums[2] += w * g;
    sums[3] += g * g;
  }
  JAX_TT_INLINE Row RowStep(C width, const C* sums, C* sum) const {
    const C s = *sum + Mean(sums[0], width);
    *sum = s;
    const C step_size = s == C{0} ? C{0} : learning_rate / (SquareRoot(s) + eps);
    const C keep = C{1} - step_size * l2 - learning_rate * decay;
    // The norm of the new row, before any of it is known.
    const C norm = SquareRoot(SquaredNorm(keep, sums[1], -step_size, sums[3], sums[2]));
    const C shrink = norm > max_norm ? max_norm / norm : C{1};
    return {shrink * keep, shrink * step_size};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C*) const { return row.keep * w - row.step_size * g; }
};

}  // namespace jax_tt
