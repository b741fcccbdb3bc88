// FFI handlers of the row cache in the CUDA module; cache_ffi.cc lists their arguments.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_tt {

XLA_FFI_DECLARE_HANDLER_SYMBOL(CacheProbeCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CacheObserveCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CachePopulateCuda);

}  // namespace jax_tt
