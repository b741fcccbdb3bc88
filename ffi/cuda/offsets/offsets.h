// The offsets of bags as a caller gave them, on the GPU.
#ifndef JAX_TT_CUDA_OFFSETS_OFFSETS_H_
#define JAX_TT_CUDA_OFFSETS_OFFSETS_H_

#include "ffi/common/status.h"
#include "ffi/core/bag_offsets.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

Status EnterBagOffsets(cudaStream_t stream, const BagOffsetsCall& call);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_OFFSETS_OFFSETS_H_
