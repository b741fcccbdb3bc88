// Pooled rows of a TT table.
#pragma once

#include "ffi/common/status.h"
#include "ffi/cpu/pool.h"
#include "ffi/cpu/tt/problem.h"

namespace jax_tt {

// out: [groups * bags, dim]; overwritten unless `add`.  saved: primary products by node for the backward pass, or null.
template <typename T>
Status TTForward(const TTProblem<T>& problem, const Pool& pool, bool add, typename TTProblem<T>::C* out,
                 typename TTProblem<T>::C* saved);

}  // namespace jax_tt
