// Makes the plan of a batch on the host.
#ifndef JAX_TT_CPU_PLAN_H_
#define JAX_TT_CPU_PLAN_H_

#include <stdint.h>

#include <algorithm>
#include <limits>

#include "ffi/common/status.h"
#include "ffi/core/lookups.h"
#include "ffi/core/plan.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cpu/pool.h"

namespace jax_tt {

// Offsets start at 0, never fall and stay within the capacity.
Status CheckOffsets(const int32_t* offsets, int64_t groups, int64_t bags, int64_t capacity);

// Whether a plan was made for this batch, whose offsets are checked.  It need not be: an array that travels through a
// partitioned program may come back in other parts than it left in.
bool IsPlanOf(const PlanLayout& layout, const Lookups& lookups, const int32_t* plan);

// Reports the `count` ids of a batch that are out of range.  Plans do so themselves where the batch has Bounds::kWarn.
void ReportOutOfRange(const TTShape& shape, const Lookups& lookups, int64_t count);

Status BuildTTPlan(const TTShape& shape, const Contraction& contraction, const Lookups& lookups, const Pool& pool,
                   int32_t* plan);
Status BuildDensePlan(int64_t num_embeddings, const Lookups& lookups, int32_t* plan);

// row_of[n]: the row that each position reads, negative (as PlanLayout::bag) where it reads none.  Ids that come split
// are not taken.
Status ResolveIds(int64_t num_embeddings, const Lookups& lookups, int64_t* row_of);

// The gradient of every position's weight before any row adds to it: NaN where the id makes NaN of its bag, else 0.
template <typename C>
void ClearWeightGradient(const PlanLayout& layout, const int32_t* plan, C* weight_gradient) {
  const int32_t* bag = layout.bag(plan);
  std::transform(bag, bag + layout.n, weight_gradient,
                 [](int32_t own) { return own == PlanLayout::kPoisoned ? std::numeric_limits<C>::quiet_NaN() : C{0}; });
}

}  // namespace jax_tt

#endif  // JAX_TT_CPU_PLAN_H_
