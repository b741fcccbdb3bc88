// Passes around the pivot of three cores for the shapes that people use, on which the general ones spend their time.
//
// Ranks are equal and one of 16, 32, 64, 128; the factors of a row are 2, 4 or 8.
#ifndef JAX_TT_CUDA_TT_FAST_H_
#define JAX_TT_CUDA_TT_FAST_H_

#include "ffi/common/status.h"
#include "ffi/cuda/pivot.h"
#include "ffi/cuda/tt_args.h"
#include "ffi/cuda/tt_pass.h"

namespace jax_tt {

// Whether there is one for this shape that the device has the shared memory for.
Status HasFastPass(const TTShape& shape, const Pivot& pivot, bool* has);

// As RowsPass and GradientPass, for shapes that have a fast pass; without workspace.
template <typename T>
Status FastRowsPass(cudaStream_t stream, const TTArgs<T>& args, const RowChunk& chunk, float* rows);
template <typename T>
Status FastGradientPass(cudaStream_t stream, const TTArgs<T>& args, const RowChunk& chunk, const float* row_gradients,
                        const GradientShares& shares);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_FAST_H_
