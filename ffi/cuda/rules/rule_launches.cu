#include <string>

#include "ffi/common/rules.h"
#include "ffi/core/optimizers/optimizers.h"
#include "ffi/cuda/rules/rule_launches.h"

namespace jax_tt {

// Each is in a source that CMake makes of rule.cu.in.
#define JAX_TT_DECLARE(Rule) extern const RuleLaunches k##Rule##Launches;
JAX_TT_OPTIMIZERS(JAX_TT_DECLARE)
#undef JAX_TT_DECLARE

Status FindLaunches(int kind, const RuleLaunches** launches) {
#define JAX_TT_LAUNCHES(Rule) &k##Rule##Launches,
  static constexpr const RuleLaunches* kOfLibrary[] = {JAX_TT_OPTIMIZERS(JAX_TT_LAUNCHES)};
#undef JAX_TT_LAUNCHES
  if (kind < kNumOptimizers) {
    *launches = kOfLibrary[kind];
    return {};
  }
  const ExportedRule& rule = *ExportedOf(kind);
  *launches = rule.launches;
  if (rule.launches == nullptr)
    return InvalidArgument("the extension of the rule '" + std::string(rule.name) +
                           "' was compiled without CUDA; compile its .cu source, too");
  if (rule.launches->layout != kOfLibrary[0]->layout)
    return InvalidArgument("the CUDA kernels of the rule '" + std::string(rule.name) +
                           "' were compiled with headers of another version; rebuild the extension");
  return {};
}

}  // namespace jax_tt
