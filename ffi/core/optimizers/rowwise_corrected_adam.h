// Adam with weight decay whose bias corrections count the steps of the row instead of those of the table.
#pragma once

#include "ffi/core/optimizers/moments.h"
#include "ffi/core/optimizers/row_counter.h"
#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct RowWiseCorrectedAdam {
  static constexpr int kElementSlots = 2, kRowSlots = 1, kSums = 0;
  struct Row {
    C correction1, correction2;
  };

  JAX_TT_HYPERPARAMETERS(C, learning_rate, b1, b2, eps, weight_decay, log_b1, log_b2);

  JAX_TT_INLINE Row RowStep(C, const C*, C* count) const {
    *count = OneMore(*count);
    // 1 - b^count without the cancellation for a b near 1.
    return {-ExponentialMinusOne(*count * log_b1), -ExponentialMinusOne(*count * log_b2)};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C* slots) const {
    const Moments<C> moments{learning_rate, b1, b2, eps, weight_decay, row.correction1, row.correction2};
    return moments.AdamStep(w, g, slots);
  }
};

}  // namespace jax_tt
