// Arguments shared by several CPU handlers.
#ifndef JAX_TT_CPU_ARGS_H_
#define JAX_TT_CPU_ARGS_H_

#include <initializer_list>
#include <string_view>

#include "ffi/common/args.h"
#include "ffi/cpu/huge_pages.h"
#include "ffi/cpu/row_update.h"
#include "ffi/cpu/tt_forward.h"

namespace jax_tt {

// The same for new results of an op.
inline void PreferHugePages(std::initializer_list<ffi::AnyBuffer> results) {
  for (const ffi::AnyBuffer& result : results)
    PreferHugePages(result.untyped_data(), static_cast<int64_t>(result.size_bytes()));
}

// Fails if the sentinel shows that the table was changed by something other than its own update.
Status CheckSentinel(const ffi::AnyBuffer& sentinel, std::string_view table);

// The step with its numbers, which a handler of the CPU can read.
OptimizerStep StepOf(const StepArgs& args);

// Reads the optimizer and the hyper-parameters of this step.
Status ReadStep(const ffi::Dictionary& attrs, const ffi::AnyBuffer& hyper, const ffi::AnyBuffer& scale,
                const ffi::AnyBuffer& seed, OptimizerStep* step);

Pool MakePool(ffi::ThreadPool thread_pool);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_ARGS_H_
