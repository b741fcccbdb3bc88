// The TT operations on the GPU: what is launched, in which order, and in which part of the workspace.
#pragma once

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/cuda/tables/queue.h"
#include "ffi/cuda/tt/args.h"
#include "ffi/cuda/tt/gradient.h"

namespace jax_tt {

// What a backward pass or an update is asked for, as far as it takes memory.
struct TTAsked {
  bool weights = false;         // the gradient of the weights
  bool check_plan = false;      // whether the plan is this batch's, and if not, another one
  bool skip_nonfinite = false;  // an update that looks at all gradients before it takes a step
};

// The plan of a batch of n ids.
CudaPlan MakeCudaPlan(const TTShape& shape, int64_t n);

// Bytes of workspace for n ids.
int64_t TTForwardWorkspace(const TTShape& shape, int64_t n, bool own_plan);
int64_t TTBackwardWorkspace(const TTShape& shape, int64_t n, const TTAsked& asked);
int64_t TTUpdateWorkspace(const TTShape& shape, int64_t n, const TTAsked& asked);
int64_t TTApplyWorkspace();

// Makes the plan, in `plan` or, where that is null, in the workspace, and fills out [groups * bags, D].  sentinel,
// hash: as in BuildPlan.
template <typename T>
Status TTForward(TableQueue& queue, TTArgs<T> args, const Lookups& lookups, const float* sentinel, bool hash,
                 int32_t* plan, float* out, void* workspace);

// The gradients of the cores; what no lookup read becomes zero.  weight_gradient: [n], or null.
//
// With `lookups` the plan is checked to be this batch's and made again where it is not.
template <typename T>
Status TTBackward(TableQueue& queue, TTArgs<T> args, const Lookups* lookups, const float* out_gradient,
                  const CoreGradients& gradients, float* weight_gradient, void* workspace);

// Backward pass and optimizer step, in place.
template <typename T>
Status TTUpdate(TableQueue& queue, TTArgs<T> args, const Lookups* lookups, const CoreTables<T>& tables,
                const float* out_gradient, const TTStep& step, float* weight_gradient, float* applied, void* workspace);

template <typename T>
Status TTApply(TableQueue& queue, const TTShape& shape, const CoreTables<T>& tables, const CoreGradients& gradients,
               const TTStep& step, float* applied, void* workspace);

}  // namespace jax_tt
