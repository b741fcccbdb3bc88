// FFI handlers of the CUDA module; tt_ffi.cc and dense_ffi.cc list their arguments.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_tt {

XLA_FFI_DECLARE_HANDLER_SYMBOL(TTPlanCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TTForwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TTBackwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TTUpdateCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TTTablesForwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TTTablesBackwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TTTablesUpdateCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TTTablesApplyCuda);

}  // namespace jax_tt
