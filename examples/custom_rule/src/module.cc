// The Python module: the rule as a capsule, for jax_tt.optimizers.register.
#include <pybind11/pybind11.h>

#include "lion.h"

namespace lion_rule {

#if defined(LION_RULE_CUDA)
extern const jax_tt::RuleLaunches kLaunches;
constexpr const jax_tt::RuleLaunches* kLaunchesOrNull = &kLaunches;
#else
constexpr const jax_tt::RuleLaunches* kLaunchesOrNull = nullptr;
#endif

constexpr jax_tt::ExportedRule kRule = jax_tt::ExportRule<Lion>("lion_rule.lion", kLaunchesOrNull);

}  // namespace lion_rule

PYBIND11_MODULE(_lion, m) { m.attr("rule") = pybind11::capsule(&lion_rule::kRule, jax_tt::kRuleCapsule); }
