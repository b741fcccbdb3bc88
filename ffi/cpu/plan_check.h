// Checks a plan before it is followed.
#ifndef JAX_TT_CPU_PLAN_CHECK_H_
#define JAX_TT_CPU_PLAN_CHECK_H_

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/core/plan.h"

namespace jax_tt {

// A plan travels through the program as an ordinary array, so what comes back need not be what BuildTTPlan made.
// Whether every index in it stays inside the table and the batch: one pass over the plan, a few thousandths of the
// work that it plans.
Status CheckPlan(const TTShape& shape, const Contraction& contraction, const PlanLayout& layout, int64_t num_bags,
                 const int32_t* plan);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_PLAN_CHECK_H_
