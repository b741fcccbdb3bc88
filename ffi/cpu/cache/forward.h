// Pooled sums over cached and uncached rows: hits are read, misses are computed.
#pragma once

#include <stdint.h>

#include <functional>

#include "ffi/common/status.h"
#include "ffi/core/lookups.h"
#include "ffi/cpu/pool.h"
#include "ffi/cpu/tt/problem.h"

namespace jax_tt {

// The misses as a separate batch with the same groups, capacity and bags: they are packed to the front of each group,
// in the order of their positions.
template <typename C>
struct PackedMisses {
  int32_t* ids = nullptr;      // as those of the batch; padding after the last miss of a group
  int32_t* offsets = nullptr;  // [groups, bags + 1]
  C* weights = nullptr;        // [n], or null for ones
  int32_t* place = nullptr;    // [n]: new position in its group of each miss; null without weights
};

// Fills bags [bag, end) with the sums of their hits.
using PoolHits = std::function<void(int64_t bag, int64_t end, int worker)>;

// Adds hits, then misses, each in the order of their positions in the bag.  In `batch`, whose offsets must have been
// checked, hits are padding.  `problem` is that of the packed misses, and its plan is built here, in `plan`.
template <typename T>
Status CacheForward(const PoolHits& pool_hits, const Lookups& batch, const typename TTProblem<T>::C* weights,
                    const TTProblem<T>& problem, const PackedMisses<typename TTProblem<T>::C>& packed, const Pool& pool,
                    int32_t* plan, typename TTProblem<T>::C* out, typename TTProblem<T>::C* saved);

}  // namespace jax_tt
