// Row cache ops on the CPU: lookup, counting and replacement.
//
// Their results depend neither on the number of threads nor on the order of a batch.
#pragma once

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/core/cache.h"
#include "ffi/cpu/tt/forward.h"

namespace jax_tt {

// slots[n]: slot of each key, -1 for a miss.
template <typename K>
Status CacheProbe(const CacheShape& shape, const K* tags, const K* keys, int64_t n, const Pool& pool, int32_t* slots);

// Counts a batch of n keys with the given slots; does not read the directory's tags.  counts[kCacheCounts] is indexed
// by CacheObserved.
template <typename K>
Status CacheObserve(const CacheDirectory<K>& directory, CachePolicy policy, const K* keys, const int32_t* slots,
                    int64_t n, const Pool& pool, int32_t* counts);

// Inserts hot ghosts.  evicted[sets, ways]: the id evicted from each slot, or -1; counts[kCacheCounts] is indexed by
// CachePopulated.
template <typename K>
Status CachePopulate(const CacheDirectory<K>& directory, const Pool& pool, K* evicted, int32_t* counts);

}  // namespace jax_tt
