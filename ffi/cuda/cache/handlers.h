// FFI handlers of the row cache in the CUDA module; cache_ffi.cc lists their arguments.
#ifndef JAX_TT_CUDA_CACHE_HANDLERS_H_
#define JAX_TT_CUDA_CACHE_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_tt {

XLA_FFI_DECLARE_HANDLER_SYMBOL(CacheProbeCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CacheObserveCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CachePopulateCuda);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_CACHE_HANDLERS_H_
