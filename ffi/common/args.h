// Arguments that the handlers of every platform read the same way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "ffi/common/ffi_util.h"
#include "ffi/common/names.h"
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

// One named attribute that is one of these names: the value of that place.
template <typename Value, size_t N>
Status ReadNamed(const ffi::Dictionary& attrs, std::string_view attribute, const char* const (&names)[N],
                 Value* value) {
  std::string_view name;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, attribute, &name));
  return FindName(attribute, names, name, value);
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
  ffi::DataType type = ffi::DataType::F32;  // of hyper and scale: that in which the rows of the table are computed
  const void* hyper = nullptr;              // [traits().hyperparameters]
  const void* scale = nullptr;              // [2]: multiplies every gradient; 0 where the step may not be taken
  const uint32_t* seed = nullptr;           // [2]

  OptimizerTraits traits() const { return RuleTraits(kind); }

  // `hyper` and `scale` for a table whose rows are computed in this type.
  template <typename C>
  Status Numbers(const C** typed_hyper, const C** typed_scale) const {
    if (type != kDataType<C>)
      return InvalidArgument("the hyper-parameters have another type than the table is stepped in");
    *typed_hyper = static_cast<const C*>(hyper);
    *typed_scale = static_cast<const C*>(scale);
    return {};
  }
};

// The hyper-parameters and the gradient scales of one step or of several, which follow each other.
Status ReadNumbers(const ffi::AnyBuffer& hyper, const ffi::AnyBuffer& scale, StepArgs* step);

// The attributes optimizer, the name of a rule, skip_nonfinite and stochastic_rounding of a fused update.
Status ReadUpdateAttrs(const ffi::Dictionary& attrs, StepArgs* step);

}  // namespace jax_tt
