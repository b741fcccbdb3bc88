// Passes over a dense table: pooled rows, their gradient and the fused update.
#pragma once

#include <stdint.h>

#include <memory>

#include "ffi/core/bag_vectors.h"
#include "ffi/core/coded_rows.h"
#include "ffi/core/lookups.h"
#include "ffi/core/packed_rows.h"
#include "ffi/cpu/passes.h"
#include "ffi/cpu/row_update.h"

namespace jax_tt {

template <typename T>
struct DenseProblem {
  using C = typename ComputeType<T>::type;

  const T* table = nullptr;  // [num_embeddings, dim], or rows of numbers or codes in bytes
  int64_t num_embeddings = 0, dim = 0;
  Lookups lookups;
  const C* weights = nullptr;  // [n], or null for ones
  BagVectors vectors;
  Codebooks codebooks;  // of rows of codes
  PackedLevels levels;  // of packed rows

  C weight(int64_t position) const { return weights == nullptr ? C{1} : weights[position]; }
};

// out: a vector of dim elements for every bag.  It also takes tables of packed rows and of codes.
template <typename T>
std::unique_ptr<Pass> DenseForward(const DenseProblem<T>& problem, typename DenseProblem<T>::C* out);

// gradient: [num_embeddings, dim], zero where no lookup reads.  weight_gradient: [n], or null.
template <typename T>
std::unique_ptr<Pass> DenseBackward(const DenseProblem<T>& problem, const typename DenseProblem<T>::C* out_gradient,
                                    typename DenseProblem<T>::C* gradient,
                                    typename DenseProblem<T>::C* weight_gradient);

// Backward pass and in-place optimizer step of the rows that were read.  *applied: 0 if the batch is poisoned or a
// gradient is not finite, regardless of whether the step was allowed; otherwise 1.
template <typename T>
std::unique_ptr<Pass> DenseUpdate(const DenseProblem<T>& problem, const RowTable<T>& table,
                                  const typename DenseProblem<T>::C* out_gradient,
                                  const OptimizerStep<typename DenseProblem<T>::C>& step,
                                  typename DenseProblem<T>::C* weight_gradient, float* applied);

}  // namespace jax_tt
