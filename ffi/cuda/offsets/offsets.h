// The offsets of bags as a caller gave them, on the GPU.
#pragma once

#include "ffi/common/status.h"
#include "ffi/core/bag_offsets.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

Status EnterBagOffsets(cudaStream_t stream, const BagOffsetsCall& call);

}  // namespace jax_tt
