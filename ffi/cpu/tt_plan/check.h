// Validation of plans.
#pragma once

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/core/plan.h"

namespace jax_tt {

// Checks that every index of the plan is inside the table and the batch.  A plan is an ordinary array of the program,
// which may have changed it since BuildTTPlan.  The pass over the plan costs a few thousandths of the planned work.
Status CheckPlan(const TTShape& shape, const Contraction& contraction, const PlanLayout& layout, int64_t num_bags,
                 const int32_t* plan);

}  // namespace jax_tt
