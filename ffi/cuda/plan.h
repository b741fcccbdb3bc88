// The plan of a batch on the GPU: which lookups name the same row, and which rows share the slices of a core.
//
// The entries of a slice, rows for the main pivot and positions for the other cores, are cut into parts: what one block
// takes, so that a slice that most rows share is not one block's work.
//
// One int32 buffer whose size is known when the program is traced.  Positions are sorted digit by digit, the least
// significant core first and the main pivot last: so rows that share the pivot's slice are adjacent, and the orders on
// the way list, for every other core, the positions by its digit.
#ifndef JAX_TT_CUDA_PLAN_H_
#define JAX_TT_CUDA_PLAN_H_

#include <stdint.h>

#include "ffi/core/host_device.h"
#include "ffi/core/lookups.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cuda/pivot.h"
#include "ffi/cuda/table_queue.h"

namespace jax_tt {

// Sizes and places of the arrays of a plan.  Passed to kernels by value.
struct CudaPlan {
  int d = 0, main = 0;
  int64_t n = 0;
  int64_t p[kMaxCores] = {};
  int64_t part_rows[kMaxCores] = {};  // entries of a part at most
  int64_t max_parts[kMaxCores] = {};

  static constexpr int kHeader = 16;
  static constexpr int32_t kPoisoned = -2;
  // kBadIds: whether any id makes NaN of its bag.  kHash: two words, a hash of the ids and offsets, if it was asked
  // for. kParts + k: parts of core k.
  enum Header { kValid = 0, kRows = 1, kBadIds = 2, kPositions = 3, kHash = 4, kBroken = 6, kParts = 8 };

  JAX_TT_INLINE int64_t bag() const { return kHeader; }         // [n]; -1: contributes nothing, or kPoisoned
  JAX_TT_INLINE int64_t order() const { return bag() + n; }     // [n] positions sorted by row
  JAX_TT_INLINE int64_t row_of() const { return order() + n; }  // [n] row of a position, -1 where there is none
  JAX_TT_INLINE int64_t row_head() const {
    return row_of() + n;
  }  // [n] the same at the first position of a row, else -1
  JAX_TT_INLINE int64_t row_begin() const { return row_head() + n; }  // [n + 1] first of the row's positions in order
  JAX_TT_INLINE int64_t row_digit(int k) const { return row_begin() + n + 1 + k * n; }  // [n] of a row
  // [n] positions sorted by the digit of core k; those of the main pivot are `order`.
  JAX_TT_INLINE int64_t list(int k) const { return k == main ? order() : row_digit(d) + (k - (k > main)) * n; }
  // [p[k] + 1] first entry of each slice: in list(k), or among the rows for the main pivot.
  JAX_TT_INLINE int64_t segment(int k) const {
    int64_t place = row_digit(d) + (d - 1) * n;
    for (int j = 0; j < k; ++j) place += p[j] + 1;
    return place;
  }
  // [p[k] + 1] first part of each slice; [max_parts] slice of a part.
  JAX_TT_INLINE int64_t first_part(int k) const {
    int64_t place = segment(d);
    for (int j = 0; j < k; ++j) place += p[j] + 1 + max_parts[j];
    return place;
  }
  JAX_TT_INLINE int64_t part_slice(int k) const { return first_part(k) + p[k] + 1; }
  JAX_TT_INLINE int64_t size() const { return first_part(d); }
};

CudaPlan MakeCudaPlan(const TTShape& shape, int64_t n);

// The plan that a kernel reads: the one it is given, or where that was made for another batch the one made again.
struct PlanRef {
  const int32_t* given = nullptr;
  const int32_t* rebuilt = nullptr;   // null: the given one is known to be this batch's
  const int32_t* is_given = nullptr;  // whether it is

  JAX_TT_INLINE bool IsGiven() const { return rebuilt == nullptr || *is_given != 0; }
  JAX_TT_INLINE const int32_t* get() const { return IsGiven() ? given : rebuilt; }
};

int64_t PlanWorkspace(const CudaPlan& layout);
// Makes a plan.  A sentinel (or none: null) that moved, or broken offsets, mark the plan as broken.  Only a plan
// with a hash can be recognised by EnsurePlan.
void BuildPlan(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
               const float* sentinel, bool hash, int32_t* plan, void* workspace);

int64_t EnsurePlanWorkspace(const CudaPlan& layout);
// A plan that may have been made for other parts of the batch is made again where it was.
PlanRef EnsurePlan(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
                   const int32_t* given, void* workspace);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_PLAN_H_
