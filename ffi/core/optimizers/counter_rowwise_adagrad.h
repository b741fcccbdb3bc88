// Row-wise Adagrad whose learning rate and weight decay depend on how often and when the row was used.
//
// docs/fused_update.md has the formulas; a mode is a number among the hyper-parameters, as only RowStep looks at it.
#pragma once

#include "ffi/core/optimizers/row_counter.h"
#include "ffi/core/optimizers/row_math.h"
#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename C>
struct CounterRowWiseAdagrad {
  static constexpr int kElementSlots = 0, kRowSlots = 3, kSums = 1;
  struct Row {
    C keep, step_size;
  };
  // The modes, whose places in these lists are hyper-parameters.
  static constexpr const char* kRates[] = {"none", "tail_id_increase", "tail_id_decrease", "counter_sgd"};
  static constexpr const char* kDecays[] = {"none", "l2", "decoupled", "adagradw"};
  static constexpr int kTailIncrease = 1, kTailDecrease = 2, kCounterSgd = 3;
  static constexpr int kL2 = 1, kDecoupled = 2, kAdagradW = 3;

  JAX_TT_HYPERPARAMETERS(C, learning_rate, eps, weight_decay, halflife, step, max_counter, adjustment_iter,
                         adjustment_ub, tail, rate_mode, decay_mode);

  JAX_TT_INLINE void Add(C w, C g, const C*, C* sums) const {
    const C penalised = decay_mode == kL2 ? g + weight_decay * w : g;
    sums[0] += penalised * penalised;
  }
  // slots: the sum of squares, the step of the last use, the counter.
  JAX_TT_INLINE Row RowStep(C width, const C* sums, C* slots) const {
    const C interval = Interval(slots[1], step);
    slots[1] = step;
    const C count = slots[2] = CountUse(slots[2], halflife, interval);
    slots[0] += Mean(sums[0], width);
    const C root = SquareRoot(slots[0]) + eps;
    const C plain = root == C{0} ? C{0} : learning_rate / root;
    const bool adjusts = adjustment_iter <= C{0} || step > adjustment_iter;
    if (!adjusts) return {C{1}, plain};
    const C step_size = count > tail ? Adjusted(plain, count) : plain;
    const C frequency = halflife > C{0} ? halflife / count : C{1};
    if (decay_mode == kL2) return {C{1} - frequency * weight_decay * plain, step_size};
    if (decay_mode == kDecoupled) return {C{1} - frequency * weight_decay * learning_rate, step_size};
    if (decay_mode != kAdagradW) return {C{1}, step_size};
    const C since = step - adjustment_iter, steps = interval < since ? interval : since;
    const C keep = C{1} - weight_decay * learning_rate, lazy = Power(keep, steps - C{1});
    return {keep * lazy, AdagradWStep(step_size, root, count) * lazy};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C*) const { return row.keep * w - row.step_size * g; }

 private:
  JAX_TT_INLINE C Adjusted(C plain, C count) const {
    const C used = count + C{1};
    if (rate_mode == kTailIncrease) return plain * Clip(Power(max_counter / used, adjustment_ub), C{1}, C{10});
    if (rate_mode == kTailDecrease)
      return plain * Clip(Power(used / max_counter, adjustment_ub), static_cast<C>(0.1), C{1});
    if (rate_mode == kCounterSgd) return learning_rate / (SquareRoot(adjustment_ub * count) + eps);
    return plain;
  }
  JAX_TT_INLINE C AdagradWStep(C otherwise, C root, C count) const {
    if (root == C{0}) return C{0};
    if (halflife == C{-1}) return learning_rate / root * SquareRoot(count);
    if (halflife == C{-2}) return Clip(learning_rate * count, C{0}, adjustment_ub) / root;
    return otherwise;
  }
};

}  // namespace jax_tt
