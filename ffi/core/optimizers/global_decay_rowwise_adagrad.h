// Row-wise Adagrad whose weight decay also makes up for the steps that did not use the row: s += mean(g^2);
// w = keep max(low, keep^(n - 1)) w - lr g / (sqrt(s) + eps), n being the steps since the row was used.
#pragma once

#include "ffi/core/optimizers/row_counter.h"
#include "ffi/core/optimizers/row_math.h"
#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct GlobalDecayRowWiseAdagrad {
  static constexpr int kElementSlots = 0, kRowSlots = 2, kSums = 1;
  struct Row {
    C keep, step_size;
  };

  JAX_TT_HYPERPARAMETERS(C, learning_rate, eps, keep, lower_bound, start, step);

  JAX_TT_INLINE void Add(C, C g, const C*, C* sums) const { sums[0] += g * g; }
  // slots: the sum of squares, the step of the last use.
  JAX_TT_INLINE Row RowStep(C width, const C* sums, C* slots) const {
    const C s = slots[0] + Mean(sums[0], width);
    slots[0] = s;
    const C step_size = s == C{0} ? C{0} : learning_rate / (SquareRoot(s) + eps);
    if (step < start) return {keep, step_size};
    const C missed = Interval(slots[1], step) - C{1};
    slots[1] = step;
    if (missed == C{0}) return {keep, step_size};
    const C late = Power(keep, missed);
    return {keep * (late < lower_bound ? lower_bound : late), step_size};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C*) const { return row.keep * w - row.step_size * g; }
};

}  // namespace jax_tt
