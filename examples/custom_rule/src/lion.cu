// The kernels of the rule for GPUs.
#include "jax_tt/cuda_rule.h"
#include "lion.h"

namespace lion_rule {

extern const jax_tt::RuleLaunches kLaunches;
const jax_tt::RuleLaunches kLaunches = jax_tt::LaunchesOf<Lion>();

}  // namespace lion_rule
