// Arguments that the handlers of every platform read the same way.
#ifndef JAX_TT_COMMON_ARGS_H_
#define JAX_TT_COMMON_ARGS_H_

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "ffi/common/ffi_util.h"
#include "ffi/common/rules.h"
#include "ffi/core/lookups.h"
#include "ffi/core/tt_shape.h"

namespace jax_tt {

using Span64 = ffi::Span<const int64_t>;

// Row factors, column factors and ranks (with both ends) of a table, checked.
Status ReadShape(Span64 row_factors, Span64 col_factors, Span64 ranks, int64_t num_embeddings, TTShape* shape);

// The number of ids of a call.
inline Status CheckIds(int64_t n) {
  if (n >= 0 && n <= std::numeric_limits<int32_t>::max()) return {};
  return InvalidArgument("one call takes at most 2^31 - 1 ids, got " + std::to_string(n) + "; split the batch");
}

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

// The number of ids that the contraction and the saved products are chosen for: the attribute, or, where a program with
// a symbolic batch size could not know it, the n of this call.
Status ReadHint(const ffi::Dictionary& attrs, int64_t n, int64_t* hint);

// The ids and offsets of a batch, with the attributes split, padded, bounds and table.  `digits` is the number of
// cores.
Status ReadLookups(const ffi::Dictionary& attrs, const ffi::AnyBuffer& ids, const ffi::AnyBuffer& offsets, int digits,
                   Lookups* lookups);

// A fused update as the call gives it.  The pointers are memory of the device, which the host must not read.
struct StepArgs {
  int kind = 0;
  bool skip_nonfinite = false;
  bool stochastic_rounding = false;
  const float* hyper = nullptr;    // [traits().hyperparameters]
  const float* scale = nullptr;    // [2]: multiplies every gradient; 0 where the step may not be taken
  const uint32_t* seed = nullptr;  // [2]

  OptimizerTraits traits() const { return RuleTraits(kind); }
};

// The attribute optimizer: the number of a rule of the library, or the name of another.
Status ReadOptimizer(const ffi::Dictionary& attrs, int* kind);

// The attributes optimizer, skip_nonfinite and stochastic_rounding of a fused update.
Status ReadUpdateAttrs(const ffi::Dictionary& attrs, StepArgs* step);

// A fused update with its arrays.
Status ReadStepArgs(const ffi::Dictionary& attrs, const ffi::AnyBuffer& hyper, const ffi::AnyBuffer& scale,
                    const ffi::AnyBuffer& seed, StepArgs* step);

}  // namespace jax_tt

#endif  // JAX_TT_COMMON_ARGS_H_
