// Finds the launches of a rule, of the library or of an extension.
#pragma once

#include "ffi/common/status.h"
#include "ffi/cuda/exported_launches.h"

namespace jax_tt {

// An error where an extension has none for this module.
Status FindLaunches(int kind, const RuleLaunches** launches);

}  // namespace jax_tt
