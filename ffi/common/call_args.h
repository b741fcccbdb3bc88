// A call on a table as the handlers of every platform read it: the batch, and the table that it reads.
#pragma once

#include <cstdint>

#include "ffi/common/table_args.h"

namespace jax_tt {

struct BatchArgs {
  const ffi::AnyBuffer& ids;
  const ffi::AnyBuffer& offsets;
  const ffi::AnyBuffer& weights;
};

// What the problems of all platforms have of a call on a TT table of their shape: cores, weights, offsets and the sizes
// of the batch.  `first_core`: the argument that is the first core.
template <typename T, typename Problem>
Status ReadCall(const ffi::Dictionary& attrs, const BatchArgs& batch, const Args& args, size_t first_core,
                Lookups* lookups, Problem* problem) {
  const TTShape& shape = problem->shape;
  JAX_TT_RETURN_IF_ERROR(ReadLookups(attrs, batch.ids, batch.offsets, shape.d, lookups));
  JAX_TT_RETURN_IF_ERROR(ReadCores<T>(shape, args, first_core, problem->cores));
  JAX_TT_RETURN_IF_ERROR(OptionalData(batch.weights, "weights", lookups->size(), &problem->weights));
  problem->offsets = lookups->offsets;
  problem->groups = lookups->groups;
  problem->capacity = lookups->capacity;
  problem->bags = lookups->bags;
  return {};
}

// The same of a call on a dense table: its sizes and the weights.
template <typename Problem>
Status ReadDenseCall(const ffi::Dictionary& attrs, const BatchArgs& batch, const ffi::AnyBuffer& table,
                     Lookups* lookups, Problem* problem) {
  if (table.dimensions().size() != 2) return InvalidArgument("a dense table has two axes");
  problem->num_embeddings = table.dimensions()[0];
  problem->dim = table.dimensions()[1];
  JAX_TT_RETURN_IF_ERROR(ReadLookups(attrs, batch.ids, batch.offsets, /*digits=*/1, lookups));
  if (lookups->type == IdType::kDigits) return InvalidArgument("a dense table takes whole ids, not digits");
  return OptionalData(batch.weights, "weights", lookups->size(), &problem->weights);
}

}  // namespace jax_tt
