// How a TT table is contracted on the GPU: around one core, the pivot, whose slices many rows share.
//
// Seen from pivot m a row is L G R: L [a, r_l] the product of the cores to the left of m, G [r_l, q, r_r] the slice of
// the pivot, R [r_r, b] the product of those to the right; a q b = D.  The gradients are
//   d L = g (G R)^T,    d R = (L G)^T g,    d G = L^T g R^T,
// so a pass around m gives the gradient of core m, and of a neighbour where that neighbour ends the train.
#pragma once

#include <stdint.h>

#include "ffi/core/tt_shape.h"

namespace jax_tt {

struct Pivot {
  int core = 0;
  int64_t a = 1, r_left = 1, q = 1, r_right = 1, b = 1;
  bool left_first = true;  // row = (L G) R rather than L (G R): the cheaper of the two

  JAX_TT_INLINE int64_t left_size() const { return a * r_left; }
  JAX_TT_INLINE int64_t right_size() const { return r_right * b; }
  JAX_TT_INLINE int64_t slice_size() const { return r_left * q * r_right; }
  // Of the product that is made first, L G [a q, r_r] or G R [r_l, q b].
  JAX_TT_INLINE int64_t product_size() const { return left_first ? a * q * r_right : r_left * q * b; }
};

Pivot MakePivot(const TTShape& shape, int core);

// The pivots whose passes give the gradients of all cores: every inner core, or the first of two.
struct PivotList {
  int count = 0;
  int core[kMaxCores] = {};
};
PivotList BackwardPivots(const TTShape& shape);

// The pivot of the forward pass, the cheapest one.  Rows are sorted by its digit.
int MainPivot(const TTShape& shape);

}  // namespace jax_tt
