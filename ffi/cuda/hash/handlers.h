// FFI handlers of hash tables in the CUDA module; hash_ffi.cc lists their arguments.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_tt {

XLA_FFI_DECLARE_HANDLER_SYMBOL(HashTablesFindCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HashTablesInsertCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HashTablesSetBackCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HashTablesInitialCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HashTablesExchangeCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HashDoubleCuda);

}  // namespace jax_tt
