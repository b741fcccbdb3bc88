// Arguments that several CPU handlers read the same way.
#ifndef JAX_TT_CPU_ARGS_H_
#define JAX_TT_CPU_ARGS_H_

#include <string_view>

#include "ffi/common/args.h"
#include "ffi/cpu/row_update.h"
#include "ffi/cpu/tt_forward.h"

namespace jax_tt {

// A table whose sentinel moved was changed by something other than its own update.
Status CheckSentinel(const ffi::AnyBuffer& sentinel, std::string_view table);

// A fused update with the numbers of this step.
Status ReadStep(const ffi::Dictionary& attrs, const ffi::AnyBuffer& hyper, const ffi::AnyBuffer& scale,
                const ffi::AnyBuffer& seed, OptimizerStep* step);

Pool MakePool(ffi::ThreadPool thread_pool);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_ARGS_H_
