// Arguments of the ops of hash tables as the handlers of every platform read them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "ffi/common/args.h"
#include "ffi/common/ffi_util.h"
#include "ffi/common/hash_checks.h"
#include "ffi/common/table_reader.h"
#include "ffi/core/hash.h"
#include "ffi/core/hash_calls.h"

namespace jax_tt {

template <>
inline constexpr ffi::DataType kDataType<bool> = ffi::DataType::PRED;

// An array of any size, which its user checks.
template <typename T>
Status ReadCounted(const ffi::AnyBuffer& buffer, std::string_view name, Counted<T>* array) {
  array->count = Count(buffer);
  return Data(buffer, name, -1, &array->data);
}

// A directory with sizes and last batches as in touched [sets, ways], and the other arrays.
inline Status ReadHashDirectory(const ffi::AnyBuffer& touched, HashDirectoryArrays arrays,
                                std::optional<HashDirectory>* directory) {
  if (touched.dimensions().size() != 2) return InvalidArgument("touched must have two axes");
  JAX_TT_RETURN_IF_ERROR(ReadCounted(touched, "touched", &arrays.touched));
  return MakeHashDirectory(touched.dimensions()[0], touched.dimensions()[1], arrays, directory);
}

// The keys of a call, and whether each position counts: keys [..., 2], present [...].
inline Status ReadHashBatch(const ffi::AnyBuffer& keys, const ffi::AnyBuffer& present, HashBatch* batch) {
  Counted<const uint32_t> words;
  Counted<const bool> here;
  JAX_TT_RETURN_IF_ERROR(ReadCounted(keys, "keys of the batch", &words));
  JAX_TT_RETURN_IF_ERROR(ReadCounted(present, "present", &here));
  return MakeHashBatch(words, here, batch);
}

// A directory before and after an op.
struct HashDirectoryArgs {
  const ffi::AnyBuffer &keys, &scores, &touched;
  ffi::AnyBuffer &new_keys, &new_scores, &new_touched;
};

// A directory that is changed in place.
inline Status ReadHashInPlace(const HashDirectoryArgs& args, std::optional<HashDirectory>* directory) {
  HashDirectoryArrays arrays{{nullptr, Count(args.keys)}, {nullptr, Count(args.scores)}, {}};
  int32_t* touched = nullptr;
  JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(args.touched, args.new_touched, "touched", Count(args.touched), &touched));
  JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(args.keys, args.new_keys, "keys", arrays.keys.count, &arrays.keys.data));
  JAX_TT_RETURN_IF_ERROR(
      UpdatedInPlace(args.scores, args.new_scores, "scores", arrays.scores.count, &arrays.scores.data));
  return ReadHashDirectory(args.touched, arrays, directory);
}

// Initial rows of one table: those of the keys that are present, or, in slots, those of all keys.
struct HashFresh {
  HashInitialArrays values = {};
  HashBatch batch = {};
  int64_t features = 0;
  void* rows = nullptr;  // [..., features], n of them, or one for every slot
  ffi::DataType type = ffi::DataType::INVALID;
  const int32_t* slots = nullptr;  // [n]; others than those of `rows`, which are `capacity`, are skipped
  int64_t capacity = 0;
};

// They read the tables of a call one after another; the handlers list the arguments.
Status ReadHashSearches(const TablesCall& call, std::vector<HashSearch>* searches);
Status ReadHashEntries(const TablesCall& call, std::vector<HashEntry>* entries);
Status ReadHashClocks(const TablesCall& call, std::vector<HashClock>* clocks);
Status ReadHashFresh(const TablesCall& call, std::vector<HashFresh>* fresh);
Status ReadHashResets(const TablesCall& call, std::vector<HashFresh>* resets);
Status ReadHashExchanges(const TablesCall& call, std::vector<HashExchanged>* exchanges);

// A directory and one with twice the sets.
Status ReadHashDoubled(const HashDirectoryArgs& args, std::optional<HashDirectory>* before,
                       std::optional<HashDirectory>* after);

// The arrays beside it; results may go on behind them.
Status ReadHashGrown(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, int64_t capacity,
                     std::vector<HashGrown>* arrays);

}  // namespace jax_tt
