// Arguments of the ops of hash tables as the handlers of every platform read them.
#ifndef JAX_TT_COMMON_HASH_ARGS_H_
#define JAX_TT_COMMON_HASH_ARGS_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "ffi/common/args.h"
#include "ffi/common/ffi_util.h"
#include "ffi/common/table_reader.h"
#include "ffi/core/hash.h"
#include "ffi/core/hash_calls.h"

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

// Initial rows of one table: those of the keys that are present, or, in slots, those of all keys.
struct HashFresh {
  HashInitialArrays values = {};
  HashBatch batch = {};
  int64_t features = 0;
  ffi::AnyBuffer rows;             // [..., features], n of them, or one for every slot
  const int32_t* slots = nullptr;  // [n]; others than those of `rows` are skipped
};

// They read the tables of a call one after another; the handlers list the arguments.
Status ReadHashSearches(const TablesCall& call, std::vector<HashSearch>* searches);
Status ReadHashEntries(const TablesCall& call, std::vector<HashEntry>* entries);
Status ReadHashClocks(const TablesCall& call, std::vector<HashClock>* clocks);
Status ReadHashFresh(const TablesCall& call, std::vector<HashFresh>* fresh);
Status ReadHashResets(const TablesCall& call, std::vector<HashFresh>* resets);
Status ReadHashExchanges(const TablesCall& call, std::vector<HashExchanged>* exchanges);

// A directory and one with twice the sets.
Status ReadHashDoubled(const HashDirectoryArgs& args, HashDirectory* before, HashDirectory* after);

// The arrays beside it; results may go on behind them.
Status ReadHashGrown(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, int64_t capacity,
                     std::vector<HashGrown>* arrays);

}  // namespace jax_tt

#endif  // JAX_TT_COMMON_HASH_ARGS_H_
