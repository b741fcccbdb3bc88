// FFI handlers of dense tables in the CUDA module; dense_ffi.cc lists their arguments.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_tt {

XLA_FFI_DECLARE_HANDLER_SYMBOL(DenseForwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DenseBackwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DenseUpdateCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DenseTablesForwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DenseTablesBackwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DenseTablesUpdateCuda);

}  // namespace jax_tt
