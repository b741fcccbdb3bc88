// Arguments of the ops of hash tables as the handlers of every platform read them.
#ifndef JAX_TT_COMMON_HASH_ARGS_H_
#define JAX_TT_COMMON_HASH_ARGS_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "ffi/common/args.h"
#include "ffi/common/ffi_util.h"
#include "ffi/core/hash.h"

namespace jax_tt {

template <>
inline constexpr ffi::DataType kDataType<bool> = ffi::DataType::PRED;

// Sizes and last batches: touched [sets, ways].
inline Status ReadHashShape(const ffi::AnyBuffer& touched, HashDirectory* directory) {
  if (touched.dimensions().size() != 2) return InvalidArgument("touched must have two axes");
  directory->sets = touched.dimensions()[0];
  directory->ways = touched.dimensions()[1];
  if (Count(touched) < 1 || Count(touched) > std::numeric_limits<int32_t>::max() || directory->ways > kMaxHashWays)
    return InvalidArgument("a table has 1 to 2^31 - 1 slots in sets of at most 64");
  return Data(touched, "touched", -1, &directory->touched);
}

// The keys of a call, and whether each position counts: keys [..., 2], present [...].
inline Status ReadHashBatch(const ffi::AnyBuffer& keys, const ffi::AnyBuffer& present, HashBatch* batch) {
  batch->n = Count(present);
  if (batch->n > std::numeric_limits<int32_t>::max()) return InvalidArgument("one call takes at most 2^31 - 1 keys");
  JAX_TT_RETURN_IF_ERROR(Data(present, "present", -1, &batch->present));
  return Data(keys, "keys of the batch", 2 * batch->n, &batch->keys);
}

inline Status ReadHashPolicy(const ffi::Dictionary& attrs, HashPolicy* policy, int64_t* min_age) {
  int64_t value = 0;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "policy", &value));
  if (value < 0 || value > static_cast<int64_t>(HashPolicy::kCustom)) return InvalidArgument("unknown policy");
  *policy = static_cast<HashPolicy>(value);
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "min_age", min_age));
  if (*min_age < 1) return InvalidArgument("min_age must be at least 1");
  return {};
}

// A directory before and after an op.
struct HashDirectoryArgs {
  const ffi::AnyBuffer &keys, &scores, &touched;
  ffi::AnyBuffer &new_keys, &new_scores, &new_touched;
};

// A directory that is changed in place.
inline Status ReadHashInPlace(const HashDirectoryArgs& args, HashDirectory* directory) {
  JAX_TT_RETURN_IF_ERROR(ReadHashShape(args.touched, directory));
  const int64_t capacity = directory->capacity();
  JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(args.touched, args.new_touched, "touched", capacity, &directory->touched));
  JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(args.keys, args.new_keys, "keys", 2 * capacity, &directory->keys));
  return UpdatedInPlace(args.scores, args.new_scores, "scores", 2 * capacity, &directory->scores);
}

// What an insertion returns beside the directory.
struct HashInsertionArgs {
  ffi::AnyBuffer &slots, &inserted, &old_keys, &old_scores, &old_touched, &counts;
};
inline Status ReadHashInsertion(const HashInsertionArgs& args, int64_t n, HashInsertion* done) {
  JAX_TT_RETURN_IF_ERROR(Data(args.slots, "slots", n, &done->slots));
  JAX_TT_RETURN_IF_ERROR(Data(args.inserted, "inserted", 2 * n, &done->keys));
  JAX_TT_RETURN_IF_ERROR(Data(args.old_keys, "old keys", 2 * n, &done->old_keys));
  JAX_TT_RETURN_IF_ERROR(Data(args.old_scores, "old scores", 2 * n, &done->old_scores));
  JAX_TT_RETURN_IF_ERROR(Data(args.old_touched, "old touched", n, &done->old_touched));
  return Data(args.counts, "counts", kHashCounts, &done->counts);
}

// The arrays of an exchange of n entries: args are the arrays, then the new entries; results the arrays, in place, then
// the old entries, if they are asked for.
Status ReadHashArrays(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, int64_t n, int64_t* capacity,
                      std::vector<HashArray>* arrays);

// A directory and one with twice the sets.
Status ReadHashDoubled(const HashDirectoryArgs& args, HashDirectory* before, HashDirectory* after);

// The arrays beside it; results may go on behind them.
Status ReadHashGrown(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, int64_t capacity,
                     std::vector<HashGrown>* arrays);

}  // namespace jax_tt

#endif  // JAX_TT_COMMON_HASH_ARGS_H_
