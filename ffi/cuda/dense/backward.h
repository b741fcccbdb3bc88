// What the backward pass of dense tables shares with their fused update.
#pragma once

#include "ffi/cuda/dense/plan.h"

namespace jax_tt {

// Adds what fills the gradients of weights that are wanted.  It reads the tables, so it comes before any update of
// them.
Status AddWeightGradients(const DensePlan& plan, GradientLaunches& launches);

}  // namespace jax_tt
