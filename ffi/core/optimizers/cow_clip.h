// Row-wise Adagrad whose gradient is clipped to c max(k |w|, low), where c counts the uses of the row (CowClip).
#pragma once

#include "ffi/core/optimizers/row_counter.h"
#include "ffi/core/optimizers/row_math.h"
#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct CowClip {
  static constexpr int kElementSlots = 0, kRowSlots = 3, kSums = 2;
  struct Row {
    C keep, step_size;
  };

  JAX_TT_HYPERPARAMETERS(C, learning_rate, eps, l2, decay, halflife, step, weight_norm_coefficient, lower_bound);

  JAX_TT_INLINE void Add(C w, C g, const C*, C* sums) const {
    const C penalised = g + l2 * w;
    sums[0] += penalised * penalised;
    sums[1] += w * w;
  }
  // slots: the sum of squares, the step of the last use, the counter.
  JAX_TT_INLINE Row RowStep(C width, const C* sums, C* slots) const {
    slots[2] = CountUse(slots[2], halflife, Interval(slots[1], step));
    slots[1] = step;
    slots[0] += Mean(sums[0], width);
    const C root = SquareRoot(slots[0]) + eps, norm = SquareRoot(sums[0]);
    const C of_weights = weight_norm_coefficient * SquareRoot(sums[1]);
    const C largest = slots[2] * (of_weights < lower_bound ? lower_bound : of_weights);
    const C clip = norm > largest ? largest / norm : C{1};
    const C step_size = root == C{0} ? C{0} : clip * learning_rate / root;
    return {C{1} - step_size * l2 - learning_rate * decay, step_size};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C*) const { return row.keep * w - row.step_size * g; }
};

}  // namespace jax_tt
