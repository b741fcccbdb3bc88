// What the backward pass of a dense table shares with its fused update.
#ifndef JAX_TT_CUDA_DENSE_BACKWARD_H_
#define JAX_TT_CUDA_DENSE_BACKWARD_H_

#include "ffi/cuda/dense_sort.h"

namespace jax_tt {

// weight_gradient: [n], zero where a position reads no row.  Reads the table, so it comes before any update of it.
template <typename T>
Status DenseWeightGradient(cudaStream_t stream, const DensePlan& plan, int dim, const T* table,
                           const float* out_gradient, float* weight_gradient);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_BACKWARD_H_
