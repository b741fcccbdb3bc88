// Builds the plan of a batch on the host.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <limits>

#include "ffi/common/status.h"
#include "ffi/core/lookups.h"
#include "ffi/core/plan.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cpu/pool.h"

namespace jax_tt {

// Whether a plan was built for this batch, whose offsets must have been checked.  A partitioned program may shard the
// plan in another way than the batch.
bool IsPlanOf(const PlanLayout& layout, const Lookups& lookups, const int32_t* plan);

Status BuildTTPlan(const TTShape& shape, const Contraction& contraction, const Lookups& lookups, const Pool& pool,
                   int32_t* plan);

// Initialises the gradient of every position's weight: NaN if the id makes its bag NaN, else 0.
template <typename C>
void ClearWeightGradient(const PlanLayout& layout, const int32_t* plan, C* weight_gradient) {
  const int32_t* bag = layout.bag(plan);
  std::transform(bag, bag + layout.n, weight_gradient,
                 [](int32_t own) { return own == PlanLayout::kPoisoned ? std::numeric_limits<C>::quiet_NaN() : C{0}; });
}

}  // namespace jax_tt
