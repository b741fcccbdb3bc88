// Gradients of rows that very many positions of a large batch read.  They are summed before those of all other rows, by
// many threads.
#pragma once

#include "ffi/cuda/dense/plan.h"

namespace jax_tt {

// Adds what sums the gradients of all long rows of tables whose ids are sorted together.
void AddLongRows(const DensePlan& plan, GradientLaunches& launches);

}  // namespace jax_tt
