// Errors of the CUDA runtime as Status.
#pragma once

#include "ffi/common/status.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

inline Status ToStatus(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return Internal(std::string("CUDA: ") + cudaGetErrorString(error));
}

}  // namespace jax_tt
