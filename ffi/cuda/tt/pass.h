// The pass around one pivot: rows of the table, or the gradients that one pivot gives.
//
// A block takes a part, rows that share one slice of the pivot, tile by tile, and keeps the slice and the products of
// the tile in shared memory.  What several rows add up to is not added here: every row writes its own share of its
// neighbours' gradients, every part its own share of the slice's, and `tt_gradient` sums them in a fixed order.
#pragma once

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/cuda/tables/queue.h"
#include "ffi/cuda/tt/args.h"

namespace jax_tt {

// How a pass divides the work; floats of shared memory, or of workspace where a tile does not fit.
struct PassPlan {
  int tile_rows = 1;
  int64_t blocks = 1;
  int64_t tile_floats = 0;
  bool in_shared = true;

  int64_t workspace_floats() const { return in_shared ? 0 : blocks * tile_floats; }
};

PassPlan PlanForward(const TTShape& shape, const CudaPlan& layout);
PassPlan PlanBackward(const TTShape& shape, const CudaPlan& layout, int pivot);

// rows: [chunk, D], the rows of the table in sorted order.
template <typename T>
Status RowsPass(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, float* rows, float* workspace);

// Shares of the gradients that the pass around a pivot gives.
struct GradientShares {
  float* slice = nullptr;  // [parts, slice size]
  float* left = nullptr;   // [chunk, slice size of core 0], where the pivot is core 1; else null
  float* right = nullptr;  // [chunk, slice size of the last core], where the pivot stands before it; else null
};

// row_gradients: [chunk, D].
template <typename T>
Status GradientPass(TableQueue& queue, const TTArgs<T>& args, int pivot, const RowChunk& chunk,
                    const float* row_gradients, const GradientShares& shares, float* workspace);

}  // namespace jax_tt
