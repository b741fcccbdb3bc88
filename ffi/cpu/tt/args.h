// Reads a TT table and a batch from the arguments of a handler.
#pragma once

#include <stdint.h>

#include "ffi/common/call_args.h"
#include "ffi/cpu/tt/problem.h"

namespace jax_tt {

// Reads a problem, which has its shape, without its plan.  *saved_size: number of elements of the saved products, if
// any.
template <typename T>
Status ReadTTProblem(const ffi::Dictionary& attrs, const BatchArgs& batch, const Args& args, size_t first_core,
                     Lookups* lookups, TTProblem<T>* problem, int64_t* saved_size) {
  int64_t hint = 0;
  const TTShape& shape = problem->shape;
  JAX_TT_RETURN_IF_ERROR(ReadCall<T>(attrs, batch, args, first_core, lookups, problem));
  JAX_TT_RETURN_IF_ERROR(ReadHint(attrs, lookups->size(), &hint));
  problem->contraction = ChooseContraction(shape, hint);
  problem->layout = MakeLayout(shape, problem->contraction, lookups->size());
  problem->poison = lookups->bounds == Bounds::kPoison;
  const bool saves = sizeof(typename TTProblem<T>::C) == sizeof(float);
  *saved_size = saves ? lookups->size() * SavedPerPosition(shape, problem->contraction, hint) : 0;
  return {};
}

}  // namespace jax_tt
