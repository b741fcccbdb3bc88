// Finds the launches of rules that extensions brought.
#ifndef JAX_TT_CUDA_RULE_LAUNCHES_H_
#define JAX_TT_CUDA_RULE_LAUNCHES_H_

#include <string>

#include "ffi/common/rules.h"
#include "ffi/cuda/exported_launches.h"

namespace jax_tt {

inline Status FindExported(int kind, const RuleLaunches** launches) {
  const ExportedRule& rule = *ExportedOf(kind);
  *launches = rule.launches;
  if (rule.launches == nullptr)
    return InvalidArgument("the extension of the rule '" + std::string(rule.name) +
                           "' was compiled without CUDA; compile its .cu source, too");
  if (rule.launches->layout != LaunchLayout())
    return InvalidArgument("the CUDA kernels of the rule '" + std::string(rule.name) +
                           "' were compiled with headers of another version; rebuild the extension");
  return {};
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_RULE_LAUNCHES_H_
