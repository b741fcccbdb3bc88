// The plan of a batch on the GPU: which lookups name the same row, and which rows share the slices of a core.
//
// One int32 buffer whose size is known when the program is traced.  Positions are sorted by row, such that rows which
// share the main pivot's slice are adjacent; for every other core they are listed by its slices.  The order within a
// slice of such a list is any fixed one.
//
// Rows are numbered in their order, but not without gaps: the first row of a block's slices has the number of the first
// sorted position among them, so that no block has to know how many rows the others have.
//
// The entries of a slice, rows for the main pivot and positions for the other cores, are cut into parts: what one block
// takes, so that a slice that most rows share is not one block's work.  Those of the main pivot end where tiles of the
// specialised passes do.  Parts have numbers with gaps, too.
#pragma once

#include <stdint.h>

#include "ffi/core/host_device.h"
#include "ffi/core/lookups.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cuda/pivot.h"
#include "ffi/cuda/tables/queue.h"

namespace jax_tt {

// Entries of one slice.
struct alignas(16) PlanPart {
  int32_t slice;       // -1: this number has no part
  int32_t begin, end;  // rows, or places in the list of the core
  int32_t count;       // parts of the slice where this is the first of them, else minus those before it
};
constexpr PlanPart kNoPart{-1, 0, 0, 0};

// Sizes and places of the arrays of a plan.  Passed to kernels by value.
struct CudaPlan {
  int d = 0, main = 0;
  int64_t n = 0;
  int64_t p[kMaxCores] = {};
  int64_t part_rows[kMaxCores] = {};   // the most entries of a part
  int64_t least_rows[kMaxCores] = {};  // the fewest entries of a part other than the last of its slice
  int64_t max_parts[kMaxCores] = {};
  // Of the main pivot: tiles of a part, and what a tile holds at most.
  int64_t part_tiles = 1, tile_rows = 0, tile_prefixes = 0;

  static constexpr int kHeader = 8;
  static constexpr int32_t kPoisoned = -2;
  // kBadIds: whether any id makes NaN of its bag.  kHash: two words, a hash of the ids and offsets, if it was asked
  // for.
  enum Header { kValid = 0, kBroken = 1, kBadIds = 2, kPositions = 3, kHash = 4 };

  JAX_TT_INLINE int64_t bag() const { return kHeader; }         // [n]; -1: contributes nothing, or kPoisoned
  JAX_TT_INLINE int64_t order() const { return bag() + n; }     // [n] positions sorted by row
  JAX_TT_INLINE int64_t row_of() const { return order() + n; }  // [n] row of a position, -1 where there is none
  JAX_TT_INLINE int64_t row_head() const {
    return row_of() + n;
  }  // [n] the same at the first position of a row, else -1
  // [n + 1] first of the row's positions in order; that after the last row of a slice is the end of the slice.
  JAX_TT_INLINE int64_t row_begin() const { return row_head() + n; }
  JAX_TT_INLINE int64_t row_digit(int k) const { return row_begin() + n + 1 + k * n; }  // [n] of a row
  // [n] positions sorted by the digit of core k; those of the main pivot are `order`.
  JAX_TT_INLINE int64_t list(int k) const { return k == main ? order() : row_digit(d) + (k - (k > main)) * n; }
  // [max_parts] of core k, in the order of its slices; aligned as they are.
  JAX_TT_INLINE int64_t parts(int k) const {
    int64_t place = (row_digit(d) + (d - 1) * n + 3) / 4 * 4;
    for (int j = 0; j < k; ++j) place += 4 * max_parts[j];
    return place;
  }
  JAX_TT_INLINE int64_t size() const { return parts(d); }
};

// Rows and distinct prefixes of a tile at most, in a batch of n ids; both 0 for a shape without fast passes.
struct FastTileSize {
  int64_t rows = 0, prefixes = 0;
};

// Of a batch of n ids, for passes with such tiles.
CudaPlan LayOutPlan(const TTShape& shape, int64_t n, const FastTileSize& tile);

// The plan that a kernel reads: the one it is given, or where that was made for another batch the one made again.
struct PlanRef {
  const int32_t* given = nullptr;
  const int32_t* rebuilt = nullptr;   // null: the given one is known to be this batch's
  const int32_t* is_given = nullptr;  // whether it is

  JAX_TT_INLINE bool IsGiven() const { return rebuilt == nullptr || *is_given != 0; }
  JAX_TT_INLINE const int32_t* get() const { return IsGiven() ? given : rebuilt; }
};

// The parts that begin at this place of a plan.
JAX_TT_INLINE const PlanPart* PartsAt(const int32_t* plan, int64_t place) {
  return reinterpret_cast<const PlanPart*>(plan + place);
}
JAX_TT_INLINE PlanPart* PartsAt(int32_t* plan, int64_t place) { return reinterpret_cast<PlanPart*>(plan + place); }

int64_t PlanWorkspace(const TTShape& shape, const CudaPlan& layout);
// Makes a plan.  A sentinel (or none: null) that moved, or broken offsets, mark the plan as broken.  Only a plan
// with a hash can be recognised by EnsurePlan.
void BuildPlan(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
               const float* sentinel, bool hash, int32_t* plan, void* workspace);

int64_t EnsurePlanWorkspace(const TTShape& shape, const CudaPlan& layout);
// A plan that may have been made for other parts of the batch is made again where it was.
PlanRef EnsurePlan(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
                   const int32_t* given, void* workspace);

}  // namespace jax_tt
