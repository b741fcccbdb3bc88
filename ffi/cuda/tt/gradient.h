// From shares to steps: the shares of a slice's gradient are summed in a fixed order, and the slice takes its step.
#pragma once

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/cuda/tables/queue.h"
#include "ffi/cuda/tables/step.h"
#include "ffi/cuda/tt/args.h"

namespace jax_tt {

// The gradients of all cores.
struct CoreGradients {
  float* core[kMaxCores] = {};  // [p, slice size]
  int32_t* touched = nullptr;   // [sum of p], whether any lookup read the slice
};

template <typename T>
struct CoreTables {
  TableRows<T> core[kMaxCores];
};

// An optimizer step of all cores.
struct TTStep {
  int kind = 0;
  StepNumbers numbers;
  bool skip_nonfinite = false;
};

// The shares of each core: of its parts, and for the cores at the ends also of its rows.
struct CoreShares {
  float* part[kMaxCores] = {};  // [max_parts, slice size]
  float* row[kMaxCores] = {};   // [chunk, slice size]; null for a pivot, whose passes write those of the parts
  // [sum of max_parts], zero at the start: how many parts of a slice have been summed, at the number of the first.
  int32_t* arrived = nullptr;
};

// Adds up shares to gradients; the first chunk assigns.  Slices that no lookup read are left alone.
void SumShares(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
               const RowChunk& chunk, const CoreShares& shares, const CoreGradients& gradients);

// The same, and every slice takes its step at once: for a batch of one chunk.  *applied: 1, or 0 when the plan is that
// of a batch that must not be trained on; whether the step was allowed changes nothing of it.
template <typename T>
Status SumSharesAndStep(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
                        const CoreShares& shares, const CoreTables<T>& tables, const TTStep& step, float* applied);

// The step of the slices that were touched.  *stop (workspace): set where a gradient is not finite, if that is to stop
// the whole step.  *applied as above.
template <typename T>
Status ApplyStep(TableQueue& queue, const TTShape& shape, const PlanRef& plan, const CoreTables<T>& tables,
                 const CoreGradients& gradients, const TTStep& step, int32_t* stop, float* applied);

}  // namespace jax_tt
