// The specialised passes of one rank, each rank compiled in a source of its own.
#ifndef JAX_TT_CUDA_TT_FAST_PASSES_H_
#define JAX_TT_CUDA_TT_FAST_PASSES_H_

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/cuda/tt_fast_tile.h"
#include "ffi/cuda/tt_pass.h"

namespace jax_tt {

template <int kRank>
struct FastPasses {
  // Of shared memory, for slices of q columns c.
  static size_t SharedBytes(int q);

  template <typename T>
  static Status Rows(cudaStream_t stream, FastArgs<T> args, int64_t max_parts, float* rows);
  template <typename T>
  static Status Shares(cudaStream_t stream, FastArgs<T> args, int64_t max_parts, const float* row_gradients,
                       const GradientShares& shares);
};

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_FAST_PASSES_H_
