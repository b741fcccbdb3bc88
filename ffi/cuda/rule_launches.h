// Finds the launches of a rule, of the library or of an extension.
#ifndef JAX_TT_CUDA_RULE_LAUNCHES_H_
#define JAX_TT_CUDA_RULE_LAUNCHES_H_

#include "ffi/common/status.h"
#include "ffi/cuda/exported_launches.h"

namespace jax_tt {

// An error where an extension has none for this module.
Status FindLaunches(int kind, const RuleLaunches** launches);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_RULE_LAUNCHES_H_
