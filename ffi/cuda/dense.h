// Bags of rows of a dense table on the GPU.  Every function only enqueues work on the stream.
#ifndef JAX_TT_CUDA_DENSE_H_
#define JAX_TT_CUDA_DENSE_H_

#include <stdint.h>

#include <string_view>

#include "ffi/common/status.h"
#include "ffi/core/host_device.h"
#include "ffi/core/lookups.h"
#include "ffi/core/optimizers/optimizers.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// The lookups of a batch and the sizes of the table, as kernels take them.
struct DenseBatch {
  IdType type = IdType::kInt32;  // never kDigits
  Bounds bounds = Bounds::kPoison;
  bool padded = false;
  const void* ids = nullptr;         // [groups, capacity]
  const int32_t* offsets = nullptr;  // [groups, bags + 1]
  const float* weights = nullptr;    // [n], or null for ones
  int64_t groups = 0, capacity = 0, bags = 0;
  int64_t num_embeddings = 0, dim = 0;
  Notice* notice = nullptr;

  JAX_TT_INLINE int64_t n() const { return groups * capacity; }
  JAX_TT_INLINE int64_t total_bags() const { return groups * bags; }
};

// A table and its slots, updated in place.
template <typename T>
struct DenseTable {
  T* values = nullptr;  // [num_embeddings, dim]
  float* slots[kMaxSlots] = {};
};

// One optimizer step.  The pointers are device memory.
struct DenseStep {
  int kind = 0;  // index into kOptimizers
  bool skip_nonfinite = false;
  bool stochastic_rounding = false;
  const float* hyper = nullptr;    // [hyper-parameters of the optimizer]
  const float* scale = nullptr;    // [2]: multiplies every gradient; 0 where the step may not be taken
  const uint32_t* seed = nullptr;  // [2]
};

// Bytes of workspace for an op ("forward", "backward" or "update") on n ids.
int64_t DenseWorkspace(std::string_view op, int64_t num_embeddings, int64_t dim, int64_t n);

// out: [groups * bags, dim], NaN where the sentinel moved.
template <typename T>
Status DenseForward(cudaStream_t stream, const DenseBatch& batch, const T* table, const float* sentinel, float* out);

// gradient: [num_embeddings, dim], zero where no lookup reads.  weight_gradient: [n], or null.
template <typename T>
Status DenseBackward(cudaStream_t stream, const DenseBatch& batch, const T* table, const float* out_gradient,
                     float* gradient, float* weight_gradient, void* workspace);

// Backward pass and optimizer step of the rows that were read, in place.  *applied: 1, or 0 when the step was skipped:
// for gradients that are not finite, if `step` says so, and for bad offsets and ids that make NaN of their bags always.
template <typename T>
Status DenseUpdate(cudaStream_t stream, const DenseBatch& batch, const DenseTable<T>& table, const float* out_gradient,
                   const DenseStep& step, float* weight_gradient, float* applied, void* workspace);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_H_
