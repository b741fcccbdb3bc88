// What several row-wise rules compute from the sums over a row.
#pragma once

#include "ffi/core/host_device.h"

namespace jax_tt {

// The mean of the elements of a row, 0 for a row without any.
template <typename C>
JAX_TT_INLINE C Mean(C sum, C width) {
  return width == C{0} ? C{0} : sum / width;
}

// |a x + b y|^2 from the sums of x^2, y^2 and x y.
template <typename C>
JAX_TT_INLINE C SquaredNorm(C a, C xx, C b, C yy, C xy) {
  const C sum = a * a * xx + C{2} * a * b * xy + b * b * yy;
  return sum > C{0} ? sum : C{0};  // rounding may leave a little less than zero
}

// |x| / |y| from their squares; 1 where either is zero, as where nothing has a gradient yet.
template <typename C>
JAX_TT_INLINE C NormRatio(C xx, C yy) {
  return xx == C{0} || yy == C{0} ? C{1} : SquareRoot(xx) / SquareRoot(yy);
}

}  // namespace jax_tt
