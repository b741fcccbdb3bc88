// Arguments that several CPU handlers read the same way.
#ifndef JAX_TT_CPU_ARGS_H_
#define JAX_TT_CPU_ARGS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "ffi/common/ffi_util.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cpu/plan.h"
#include "ffi/cpu/row_update.h"
#include "ffi/cpu/tt_forward.h"

namespace jax_tt {

using Span64 = ffi::Span<const int64_t>;

// Row factors, column factors and ranks (with both ends) of a table, checked.
Status ReadShape(Span64 row_factors, Span64 col_factors, Span64 ranks, int64_t num_embeddings, TTShape* shape);

// One named attribute of a call.
template <typename T>
Status ReadAttr(const ffi::Dictionary& attrs, std::string_view name, T* value) {
  auto found = attrs.get<T>(name);
  if (!found.has_value()) return InvalidArgument("attribute " + std::string(name) + " is missing or of another type");
  *value = *found;
  return {};
}

// The shape of a TT table from the attributes row_factors, col_factors, ranks and num_embeddings.
Status ReadTable(const ffi::Dictionary& attrs, TTShape* shape);

// The ids and offsets of a batch, with the attributes split, padded, bounds and table.  `digits` is the number of
// cores.
Status ReadLookups(const ffi::Dictionary& attrs, const ffi::AnyBuffer& ids, const ffi::AnyBuffer& offsets, int digits,
                   Lookups* lookups);

// A table whose sentinel is not 1 was changed by something other than its own update.
Status CheckSentinel(const ffi::AnyBuffer& sentinel, std::string_view table);

// A fused update, with the attributes optimizer, skip_nonfinite and stochastic_rounding.
Status ReadStep(const ffi::Dictionary& attrs, const ffi::AnyBuffer& hyper, const ffi::AnyBuffer& scale,
                const ffi::AnyBuffer& seed, OptimizerStep* step);

Pool MakePool(ffi::ThreadPool thread_pool);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_ARGS_H_
