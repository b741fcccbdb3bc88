// Sums that keep the digits which rounding would lose.
//
// A sum of n floats that are added one after the other has an error that grows with n.  Sums of many terms are
// therefore made of blocks of terms, and the sums of the blocks are added with the rounding error of every addition.
#pragma once

#include "ffi/core/host_device.h"

namespace jax_tt {

// Adds x to *sum, and the rounding error of this addition to *lost.  V: a floating-point type, or a vector of one.
template <typename V>
JAX_TT_INLINE void AddExactly(const V& x, V* sum, V* lost) {
  const V next = *sum + x, added = next - *sum;
  *lost += (*sum - (next - added)) + (x - added);
  *sum = next;
}

// The sum with its rounding errors, which are NaN if the sum is not finite.
template <typename C>
JAX_TT_INLINE C ExactSum(C sum, C lost) {
  return lost == lost ? sum + lost : sum;
}

}  // namespace jax_tt
