// Between rows and bags: rows pooled into bags, and the gradients of bags gathered for rows.
#pragma once

#include <stdint.h>

#include "ffi/cuda/tables/queue.h"
#include "ffi/cuda/tt/args.h"

namespace jax_tt {

// out: [groups * bags, D], the weighted sums of the rows of a chunk; those of later chunks are added to the first's.
template <typename T>
void PoolRows(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* rows, float* out);

// row_gradients: [chunk, D], the sum over a row's positions of weight times their bag's gradient, in sorted order.
template <typename T>
void GatherRowGradients(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* out_gradient,
                        float* row_gradients, const Cleared& cleared);

// weight_gradient: [n], the row of a position times its bag's gradient, for the rows of a chunk; the first chunk also
// clears what has no row.
template <typename T>
void WeightGradients(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* rows,
                     const float* out_gradient, float* weight_gradient);

}  // namespace jax_tt
