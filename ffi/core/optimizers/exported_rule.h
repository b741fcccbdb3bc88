// What an extension hands over: a rule that was compiled outside the library.
#pragma once

#include <stdint.h>

#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

// Name of the capsule that holds a pointer to an ExportedRule.
constexpr char kRuleCapsule[] = "jax_tt.rule";

// Raise it with every change of ExportedRule, or of what its functions are given.
constexpr uint32_t kRuleAbi = 6;

// The launches of a rule on a GPU; ffi/cuda/rules/rule_launches.h defines it.
struct RuleLaunches;

// Plain old data: the library and the extension may have different standard libraries.
struct ExportedRule {
  uint32_t abi;  // comes first in every version
  OptimizerTraits traits;
  const char* name;
  RowUpdate<float> update_float;
  RowUpdate<double> update_double;
  const RuleLaunches* launches;  // null: compiled without CUDA
};

}  // namespace jax_tt
