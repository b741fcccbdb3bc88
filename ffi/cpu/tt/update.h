// The optimizer step of TT cores from the gradients of their slices.
#pragma once

#include "ffi/common/status.h"
#include "ffi/cpu/row_update.h"
#include "ffi/cpu/tt/backward.h"

namespace jax_tt {

template <typename T>
struct CoreTables {
  RowTable<T> table[kMaxCores];  // row = slice
};

// Updates the touched slices.  *applied: 0 if the gradients prevent the step, regardless of whether it was allowed;
// otherwise 1.
template <typename T>
Status TTApply(const TTShape& shape, const Pool& pool, const CoreTables<T>& cores,
               const CoreGradients<typename ComputeType<T>::type>& gradients,
               const OptimizerStep<typename ComputeType<T>::type>& step, float* applied);

// Fused backward pass and optimizer step.  The problem's cores are the tables that are updated.  A poisoned batch
// changes nothing.
template <typename T>
Status TTUpdate(const TTProblem<T>& problem, const Pool& pool, const CoreTables<T>& cores,
                const typename TTProblem<T>::C* out_gradient, const typename TTProblem<T>::C* saved,
                const OptimizerStep<typename TTProblem<T>::C>& step, typename TTProblem<T>::C* weight_gradient,
                float* applied);

}  // namespace jax_tt
