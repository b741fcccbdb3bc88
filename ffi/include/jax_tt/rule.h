// Exports an update rule of your own to jax_tt: include it where the rule is bound to Python.
//
//   template <typename C>
//   struct Lion { ... };  // as ffi/core/optimizers/rule.h describes it
//
//   constexpr jax_tt::ExportedRule kLion = jax_tt::ExportRule<Lion>("my_package.lion");
//
// Python needs a capsule of the name jax_tt::kRuleCapsule with the address of kLion, which must live as long as the
// process.  Compile with -fno-math-errno -fno-trapping-math, as the library is, and for the processors that you have.
#pragma once

#include "ffi/core/optimizers/exported_rule.h"
#include "ffi/core/optimizers/moments.h"
#include "ffi/core/optimizers/row_counter.h"
#include "ffi/core/optimizers/row_math.h"
#include "ffi/cpu/kernels/update_row.h"

namespace jax_tt {

// `launches`: what jax_tt/cuda_rule.h exports, for a rule that is compiled for GPUs, too.
template <template <typename> class Rule>
constexpr ExportedRule ExportRule(const char* name, const RuleLaunches* launches = nullptr) {
  return {kRuleAbi, TraitsOf<Rule>(), name, UpdateRow<float, Rule>, UpdateRow<double, Rule>, launches};
}

}  // namespace jax_tt
