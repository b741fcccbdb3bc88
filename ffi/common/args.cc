#include "ffi/common/args.h"

#include <algorithm>
#include <limits>
#include <string>

namespace jax_tt {

Status ReadShape(Span64 row_factors, Span64 col_factors, Span64 ranks, int64_t num_embeddings, TTShape* shape) {
  const size_t d = row_factors.size();
  if (d < 2 || d > kMaxCores || col_factors.size() != d || ranks.size() != d + 1)
    return InvalidArgument("a TT table has 2 to 5 cores, as many row and column factors, and one rank more");
  shape->d = static_cast<int>(d);
  shape->num_embeddings = num_embeddings;
  // Sizes are products of numbers that nobody has checked yet; one that wraps could pass a size check by accident.
  constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max(), kMaxProduct = int64_t{1} << 40;
  int64_t rows = 1, columns = 1, largest_rank = 1;
  for (size_t k = 0; k < d; ++k) {
    shape->p[k] = row_factors[k];
    shape->q[k] = col_factors[k];
    shape->r[k] = ranks[k];
    shape->r[k + 1] = ranks[k + 1];
    if (row_factors[k] < 1 || row_factors[k] > kMaxInt || col_factors[k] < 1 || ranks[k] < 1 || ranks[k + 1] < 1 ||
        __builtin_mul_overflow(rows, row_factors[k], &rows))
      return InvalidArgument("factors and ranks must be positive and the product of the row factors below 2^63");
    largest_rank = std::max(largest_rank, ranks[k]);
    int64_t size = 0;
    if (__builtin_mul_overflow(columns, col_factors[k], &columns) || columns > kMaxInt ||
        largest_rank > kMaxProduct / columns ||
        __builtin_mul_overflow(ranks[k] * col_factors[k], ranks[k + 1], &size) ||
        __builtin_mul_overflow(size, row_factors[k], &size))
      return InvalidArgument("a table has at most 2^31 - 1 columns, and columns times the largest rank at most 2^40");
  }
  if (ranks[0] != 1 || ranks[d] != 1) return InvalidArgument("the first and the last rank of a TT table are 1");
  if (num_embeddings < 0 || num_embeddings > rows)
    return InvalidArgument("num_embeddings must lie between 0 and the product of the row factors");
  return {};
}

Status ReadTable(const ffi::Dictionary& attrs, TTShape* shape) {
  Span64 row_factors, col_factors, ranks;
  int64_t num_embeddings = 0;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "row_factors", &row_factors));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "col_factors", &col_factors));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "ranks", &ranks));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "num_embeddings", &num_embeddings));
  return ReadShape(row_factors, col_factors, ranks, num_embeddings, shape);
}

Status ReadHint(const ffi::Dictionary& attrs, int64_t n, int64_t* hint) {
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "hint", hint));
  if (*hint < 0 || *hint > std::numeric_limits<int32_t>::max())
    return InvalidArgument("hint must lie between 0 and 2^31 - 1");
  if (*hint == 0) *hint = n;
  return {};
}

Status ReadLookups(const ffi::Dictionary& attrs, const ffi::AnyBuffer& ids, const ffi::AnyBuffer& offsets, int digits,
                   Lookups* lookups) {
  bool split = false;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "split", &split));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "padded", &lookups->padded));
  JAX_TT_RETURN_IF_ERROR(ReadNamed(attrs, "bounds", kBoundsNames, &lookups->bounds));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "table", &lookups->table));
  if (offsets.element_type() != ffi::DataType::S32 || offsets.dimensions().size() == 0)
    return InvalidArgument("offsets must be int32 with at least one axis");
  const int64_t per_group = offsets.dimensions().back();
  if (per_group < 1) return InvalidArgument("offsets must hold at least the first offset of each group");
  lookups->bags = per_group - 1;
  lookups->groups = Count(offsets) / per_group;
  lookups->offsets = static_cast<const int32_t*>(offsets.untyped_data());
  lookups->ids = ids.untyped_data();
  const int64_t per_id = split ? digits : 1;
  const int64_t count = Count(ids) / per_id;
  lookups->capacity = lookups->groups == 0 ? 0 : count / lookups->groups;
  if (lookups->size() * per_id != Count(ids))
    return InvalidArgument("ids and offsets disagree on the number of groups");
  if (lookups->size() > std::numeric_limits<int32_t>::max() ||
      lookups->groups * lookups->bags > std::numeric_limits<int32_t>::max())
    return InvalidArgument("one call takes at most 2^31 - 1 ids and as many bags; split the batch");
  switch (ids.element_type()) {
    case ffi::DataType::S32:
      lookups->type = split ? IdType::kDigits : IdType::kInt32;
      break;
    case ffi::DataType::U32:
      lookups->type = IdType::kUint32;
      break;
    case ffi::DataType::S64:
      lookups->type = IdType::kInt64;
      break;
    default:
      return InvalidArgument("ids must be int32, uint32, int64 or int32 digits");
  }
  if (split && lookups->type != IdType::kDigits) return InvalidArgument("split ids must be int32 digits");
  lookups->words_per_id = lookups->type == IdType::kInt64 ? 2 : per_id;
  return {};
}

Status ReadUpdateAttrs(const ffi::Dictionary& attrs, StepArgs* step) {
  std::string_view rule;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "optimizer", &rule));
  JAX_TT_RETURN_IF_ERROR(FindRule(rule, &step->kind));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "skip_nonfinite", &step->skip_nonfinite));
  return ReadAttr(attrs, "stochastic_rounding", &step->stochastic_rounding);
}

Status ReadNumbers(const ffi::AnyBuffer& hyper, const ffi::AnyBuffer& scale, StepArgs* step) {
  step->type = hyper.element_type();
  if ((step->type != ffi::DataType::F32 && step->type != ffi::DataType::F64) || scale.element_type() != step->type)
    return InvalidArgument("hyper-parameters and gradient scales must be float32, or all of them float64");
  step->hyper = hyper.untyped_data();
  step->scale = scale.untyped_data();
  return {};
}

}  // namespace jax_tt
