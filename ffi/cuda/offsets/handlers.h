// FFI handler of the offsets of bags in the CUDA module; ffi.cc lists its arguments.
#ifndef JAX_TT_CUDA_OFFSETS_HANDLERS_H_
#define JAX_TT_CUDA_OFFSETS_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_tt {

XLA_FFI_DECLARE_HANDLER_SYMBOL(BagOffsetsCuda);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_OFFSETS_HANDLERS_H_
