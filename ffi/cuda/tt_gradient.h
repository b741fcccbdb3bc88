// From shares to steps: the shares of a slice's gradient are summed in a fixed order, and the slice takes its step.
#ifndef JAX_TT_CUDA_TT_GRADIENT_H_
#define JAX_TT_CUDA_TT_GRADIENT_H_

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/cuda/table_step.h"
#include "ffi/cuda/tt_args.h"

namespace jax_tt {

// The gradients of all cores.
struct CoreGradients {
  float* core[kMaxCores] = {};  // [p, slice size]
  int32_t* touched = nullptr;   // [sum of p], whether any lookup read the slice; null where nobody asks
};

// Where the shares of each core stand: by part for a pivot, by row of the chunk for the cores at the ends.
struct CoreShares {
  const float* core[kMaxCores] = {};
};

// Sums the shares of a chunk; the first chunk assigns, and clears the slices that no lookup read if `clear`.
Status SumShares(cudaStream_t stream, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
                 const RowChunk& chunk, const CoreShares& shares, const CoreGradients& gradients, bool clear);

// The step of the slices that were touched.  *skip (workspace): set where a gradient is not finite, if that is to stop
// the whole step.  *applied: 1, or 0 then.
template <typename T>
struct CoreTables {
  TableRows<T> core[kMaxCores];
};
template <typename T>
Status ApplyStep(cudaStream_t stream, const TTShape& shape, int kind, const CoreTables<T>& tables,
                 const CoreGradients& gradients, const StepNumbers& step, bool skip_nonfinite, int32_t* skip,
                 float* applied);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_GRADIENT_H_
