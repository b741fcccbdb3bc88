// Compiles an update rule of your own for GPUs: include it in a .cu source that is compiled by nvcc.
//
//   extern const jax_tt::RuleLaunches kLionLaunches = jax_tt::LaunchesOf<Lion>();
//
// Its address is the second argument of jax_tt::ExportRule.  nvcc needs -std=c++20 --expt-relaxed-constexpr and, as
// -Xcompiler=, -fvisibility=hidden.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ffi/core/optimizers/exported_rule.h"
#include "ffi/core/optimizers/moments.h"
#include "ffi/core/optimizers/row_counter.h"
#include "ffi/core/optimizers/row_math.h"
#include "ffi/cuda/dense/step.h"
#include "ffi/cuda/rules/rule_launches.h"
#include "ffi/cuda/tt/step.h"

namespace jax_tt {

// What changes the meaning of arguments and no size raises kRuleAbi.
constexpr uint64_t LaunchLayout() {
  uint64_t layout = kRuleAbi;
  for (const size_t size : {sizeof(TableList<GradientTable>), sizeof(DensePlan), sizeof(SumAndStepArgs<float>),
                            sizeof(StepArgsOf<float>), sizeof(TablesOnDevice)})
    layout = layout * 1000003 + size;
#if defined(JAX_TT_EMULATION)
  layout = ~layout;  // emulated kernels cannot run on a GPU, nor those of a GPU in an emulation
#endif
  return layout;
}

template <template <typename> class Rule>
constexpr RuleLaunches LaunchesOf() {
  return {LaunchLayout(), &kDenseLaunches<Rule>, &kSliceLaunches<float, Rule>, &kSliceLaunches<bfloat16, Rule>,
          &kSliceLaunches<float16, Rule>};
}

}  // namespace jax_tt
