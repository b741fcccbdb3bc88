// Bytes that the host hands to the device within the stream.
#pragma once

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// Writes `count` words of the host to the device.  They travel as parameters of kernels, which a CUDA graph keeps: a
// copy from memory that the host may change or free in the meantime would be read again at every replay.
Status Upload(cudaStream_t stream, const uint32_t* from, int64_t count, uint32_t* to);

}  // namespace jax_tt
