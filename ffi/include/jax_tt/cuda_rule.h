// Compiles an update rule of your own for GPUs: include it in a .cu source that is compiled by nvcc.
//
//   extern const jax_tt::RuleLaunches kLionLaunches = jax_tt::LaunchesOf<Lion>();
//
// Its address is the second argument of jax_tt::ExportRule.  nvcc needs -std=c++20 --expt-relaxed-constexpr and, as
// -Xcompiler=, -fvisibility=hidden.
#pragma once

#include "ffi/core/optimizers/moments.h"
#include "ffi/core/optimizers/row_counter.h"
#include "ffi/core/optimizers/row_math.h"
#include "ffi/cuda/exported_launches.h"

namespace jax_tt {

template <template <typename> class Rule>
constexpr RuleLaunches LaunchesOf() {
  return {LaunchLayout(), DenseLaunchesOf<Rule>(), SliceLaunchesOf<float, Rule>(), SliceLaunchesOf<bfloat16, Rule>(),
          SliceLaunchesOf<float16, Rule>()};
}

}  // namespace jax_tt
