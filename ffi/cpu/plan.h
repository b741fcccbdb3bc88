// Makes the plan of a batch on the host.
#ifndef JAX_TT_CPU_PLAN_H_
#define JAX_TT_CPU_PLAN_H_

#include <stdint.h>

#include <string_view>

#include "ffi/common/status.h"
#include "ffi/core/plan.h"
#include "ffi/core/tt_shape.h"

namespace jax_tt {

// What an id outside [0, num_embeddings) does.  kUnchecked promises there is none; memory safety then clamps.  kPoison
// makes its bag NaN: an error of one device alone would leave the others waiting for it in the next collective.
enum class Bounds : int64_t { kClip = 0, kZero = 1, kError = 2, kUnchecked = 3, kPoison = 4 };

enum class IdType { kInt32, kUint32, kInt64, kDigits };

// The lookups of a batch: `groups` independent blocks of `capacity` ids and `bags` bags each.
struct Lookups {
  IdType type = IdType::kInt32;
  const void* ids = nullptr;         // [groups, capacity], digits: int32 [groups, capacity, d]
  const int32_t* offsets = nullptr;  // [groups, bags + 1], last one included
  int64_t groups = 0, capacity = 0, bags = 0;
  int64_t words_per_id = 1;  // of 32 bits
  bool padded = false;       // an id with all bits set is padding
  Bounds bounds = Bounds::kError;
  std::string_view table;  // named in errors

  int64_t size() const { return groups * capacity; }
};

// Offsets start at 0, never fall and stay within the capacity.
Status CheckOffsets(const int32_t* offsets, int64_t groups, int64_t bags, int64_t capacity);

// Whether a plan was made for this batch.  It need not be: an array that travels through a partitioned program may come
// back in other parts than it left in.
bool IsPlanOf(const PlanLayout& layout, const Lookups& lookups, const int32_t* plan);

Status BuildTTPlan(const TTShape& shape, const Contraction& contraction, const Lookups& lookups, int32_t* plan);
Status BuildDensePlan(int64_t num_embeddings, const Lookups& lookups, int32_t* plan);

// row_of[n]: the row that each position reads, negative (as PlanLayout::bag) where it reads none.  Ids that come split
// are not taken.
Status ResolveIds(int64_t num_embeddings, const Lookups& lookups, int64_t* row_of);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_PLAN_H_
