// The limits of hash tables, for every entrance: handlers of every platform, and functions of the Python modules.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>

#include "ffi/common/status.h"
#include "ffi/core/hash.h"

namespace jax_tt {

// An array of a call with its number of elements, which is negative where the op does not look at the array.
template <typename T>
struct Counted {
  T* data = nullptr;
  int64_t count = -1;

  Status Check(std::string_view name, int64_t expected) const {
    return count < 0 ? Status{} : CheckCount(name, count, expected);
  }
};

struct HashDirectoryArrays {
  Counted<uint32_t> keys, scores;
  Counted<int32_t> touched;
};

inline Status MakeHashDirectory(int64_t sets, int64_t ways, const HashDirectoryArrays& arrays,
                                std::optional<HashDirectory>* directory) {
  if (sets < 1 || ways < 1 || ways > kMaxHashWays || sets > std::numeric_limits<int32_t>::max() / ways)
    return InvalidArgument("a table has 1 to 2^31 - 1 slots in sets of at most 64");
  const int64_t capacity = sets * ways;
  JAX_TT_RETURN_IF_ERROR(arrays.keys.Check("keys", 2 * capacity));
  JAX_TT_RETURN_IF_ERROR(arrays.scores.Check("scores", 2 * capacity));
  JAX_TT_RETURN_IF_ERROR(arrays.touched.Check("touched", capacity));
  directory->emplace(HashDirectory(sets, ways, arrays.keys.data, arrays.scores.data, arrays.touched.data));
  return {};
}

// The keys of a call, and whether each position counts: keys [n, 2], present [n].
inline Status MakeHashBatch(const Counted<const uint32_t>& keys, const Counted<const bool>& present, HashBatch* batch) {
  if (present.count > std::numeric_limits<int32_t>::max())
    return InvalidArgument("one call takes at most 2^31 - 1 keys");
  *batch = {keys.data, present.data, present.count};
  return keys.Check("keys of the batch", 2 * present.count);
}

}  // namespace jax_tt
