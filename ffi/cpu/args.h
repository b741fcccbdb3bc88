// Arguments that several CPU handlers read the same way.
#ifndef JAX_TT_CPU_ARGS_H_
#define JAX_TT_CPU_ARGS_H_

#include <cstdint>
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

// The ids and offsets of a batch.  `digits` is the number of cores, for ids that come split.
Status ReadLookups(const ffi::AnyBuffer& ids, const ffi::AnyBuffer& offsets, bool split, int digits, bool padded,
                   int64_t bounds, std::string_view table, Lookups* lookups);

// A table whose sentinel is not 1 was changed by something other than its own update.
Status CheckSentinel(const ffi::AnyBuffer& sentinel, std::string_view table);

// hyper, gradient scale and seed of a fused update.
Status ReadStep(int64_t kind, const ffi::AnyBuffer& hyper, const ffi::AnyBuffer& scale, const ffi::AnyBuffer& seed,
                bool skip_nonfinite, bool stochastic_rounding, OptimizerStep* step);

Pool MakePool(ffi::ThreadPool thread_pool);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_ARGS_H_
