// What several row-wise rules compute from the sums over a row.
#ifndef JAX_TT_CORE_OPTIMIZERS_ROW_MATH_H_
#define JAX_TT_CORE_OPTIMIZERS_ROW_MATH_H_

#include "ffi/core/host_device.h"

namespace jax_tt {

// The mean of the elements of a row, 0 for a row without any.
template <typename C>
JAX_TT_INLINE C Mean(C sum, C width) {
  return width == C{0} ? C{0} : sum / width;
}

}  // namespace jax_tt

#endif  // JAX_TT_CORE_OPTIMIZERS_ROW_MATH_H_
