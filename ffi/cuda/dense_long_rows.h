// Gradients of rows that very many positions read.  They are summed before those of all other rows, by many threads.
#ifndef JAX_TT_CUDA_DENSE_LONG_ROWS_H_
#define JAX_TT_CUDA_DENSE_LONG_ROWS_H_

#include "ffi/cuda/dense_sort.h"

namespace jax_tt {

// A row is long if no other row begins behind it in its first tile or in the two tiles after that.  It fills the next
// tile, whose place in TablePlan::partial holds the sum of the whole row in the end.
__device__ __forceinline__ float* LongRowTotal(const TablePlan& plan, uint32_t first_tile, int dim) {
  return plan.partial + static_cast<int64_t>(first_tile + 1) * dim;
}

// Adds what sums the gradients of all long rows.
void AddLongRows(const DensePlan& plan, GradientLaunches& launches);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_LONG_ROWS_H_
