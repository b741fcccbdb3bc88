// FFI handler of the offsets of bags in the CUDA module; ffi.cc lists its arguments.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_tt {

XLA_FFI_DECLARE_HANDLER_SYMBOL(BagOffsetsCuda);

}  // namespace jax_tt
