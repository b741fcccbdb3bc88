#include "ffi/common/hash_args.h"

namespace jax_tt {
namespace {

int64_t Bytes(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.size_bytes()); }

// Array k of an exchange.
Status ReadExchanged(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, size_t k, int64_t n,
                     int64_t* capacity, HashArray* array) {
  const size_t arrays = args.size() / 2;
  const auto in = args.get<ffi::AnyBuffer>(k), from = args.get<ffi::AnyBuffer>(arrays + k);
  auto out = results.get<ffi::AnyBuffer>(k), old = results.get<ffi::AnyBuffer>(arrays + k);
  if (!in.has_value() || !from.has_value() || !out.has_value()) return InvalidArgument("an array is missing");
  if (in->dimensions().size() < 1) return InvalidArgument("arrays must have an axis of slots");
  if (k > 0 && in->dimensions()[0] != *capacity) return InvalidArgument("arrays must have the same number of slots");
  if (in->untyped_data() != (*out)->untyped_data() && Bytes(*in) > 0)
    return InvalidArgument("arrays must be updated in place");
  if (from->element_type() != in->element_type()) return InvalidArgument("entries must have the type of their array");
  *capacity = in->dimensions()[0];
  if (Bytes(*in) == 0) return {};
  array->entries = static_cast<char*>((*out)->untyped_data());
  array->entry_bytes = Bytes(*in) / *capacity;
  array->item_bytes = Bytes(*in) / Count(*in);
  array->from = static_cast<const char*>(from->untyped_data());
  array->constant = from->dimensions().size() == 0;
  if (!array->constant) JAX_TT_RETURN_IF_ERROR(CheckCount("entries", Bytes(*from), n * array->entry_bytes));
  if (results.size() <= arrays) return {};
  if (!old.has_value()) return InvalidArgument("an array of old entries is missing");
  array->old = static_cast<char*>((*old)->untyped_data());
  return CheckCount("old entries", Bytes(**old), n * array->entry_bytes);
}

// A new array that has twice the size of an old one.
template <typename T>
Status ReadDoubled(const ffi::AnyBuffer& before, const ffi::AnyBuffer& after, const char* name, int64_t count, T** old,
                   T** fresh) {
  JAX_TT_RETURN_IF_ERROR(Data(before, name, count, old));
  return Data(after, name, 2 * count, fresh);
}

}  // namespace

Status ReadHashArrays(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, int64_t n, int64_t* capacity,
                      std::vector<HashArray>* arrays) {
  arrays->resize(args.size() / 2);
  for (size_t k = 0; k < arrays->size(); ++k)
    JAX_TT_RETURN_IF_ERROR(ReadExchanged(args, results, k, n, capacity, &(*arrays)[k]));
  return {};
}

Status ReadHashDoubled(const HashDirectoryArgs& args, HashDirectory* before, HashDirectory* after) {
  JAX_TT_RETURN_IF_ERROR(ReadHashShape(args.touched, before));
  const int64_t capacity = before->capacity();
  if (capacity >= int64_t{1} << 30) return InvalidArgument("a table has at most 2^31 - 1 slots");
  after->sets = 2 * before->sets;
  after->ways = before->ways;
  JAX_TT_RETURN_IF_ERROR(
      ReadDoubled(args.touched, args.new_touched, "touched", capacity, &before->touched, &after->touched));
  JAX_TT_RETURN_IF_ERROR(ReadDoubled(args.keys, args.new_keys, "keys", 2 * capacity, &before->keys, &after->keys));
  return ReadDoubled(args.scores, args.new_scores, "scores", 2 * capacity, &before->scores, &after->scores);
}

Status ReadHashGrown(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, int64_t capacity,
                     std::vector<HashGrown>* arrays) {
  for (size_t k = 0; k < args.size(); ++k) {
    const auto old = args.get<ffi::AnyBuffer>(k);
    auto grown = results.get<ffi::AnyBuffer>(k);
    if (!old.has_value() || !grown.has_value()) return InvalidArgument("an array is missing");
    JAX_TT_RETURN_IF_ERROR(CheckCount("array", Bytes(**grown), 2 * Bytes(*old)));
    if (Bytes(*old) % capacity != 0) return InvalidArgument("arrays must have an entry for every slot");
    arrays->push_back({static_cast<const char*>(old->untyped_data()), static_cast<char*>((*grown)->untyped_data()),
                       Bytes(*old) / capacity});
  }
  return {};
}

}  // namespace jax_tt
