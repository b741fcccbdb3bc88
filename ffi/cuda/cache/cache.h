// The row cache on the GPU.  Every function only enqueues work on the stream.  ffi/core/cache.h has the arithmetic.
//
// K: type of the ids, int32_t or int64_t.
#pragma once

#include <stdint.h>

#include <string_view>

#include "ffi/common/status.h"
#include "ffi/core/cache.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// Bytes of workspace for an op ("probe", "observe" or "populate") on n ids.
int64_t CacheWorkspace(std::string_view op, int64_t n, const CacheShape& shape);

// slots: [n] where each key is cached, -1 where it is not.
template <typename K>
Status CacheProbe(cudaStream_t stream, const CacheShape& shape, const K* tags, const K* keys, int64_t n,
                  int32_t* slots);

// Most ids that one call can count: its tables number twice as many entries, and one more, in 32 bits.
constexpr int64_t kMaxCacheIds = int64_t{1} << 30;

// Counts a batch in place.  slots: [n], those of the keys.  counts: [kCacheCounts], in the order of CacheObserved.
template <typename K>
Status CacheObserve(cudaStream_t stream, const CacheDirectory<K>& directory, CachePolicy policy, const K* keys,
                    const int32_t* slots, int64_t n, int32_t* counts, void* workspace);
int64_t CacheObserveWorkspace(int64_t n, const CacheShape& shape);

// Lets hot ghosts in, in place.  evicted: [sets, ways] the id that left each slot, or -1.  counts: [kCacheCounts], in
// the order of CachePopulated.
template <typename K>
Status CachePopulate(cudaStream_t stream, const CacheDirectory<K>& directory, K* evicted, int32_t* counts,
                     void* workspace);
int64_t CachePopulateWorkspace(const CacheShape& shape);

}  // namespace jax_tt
