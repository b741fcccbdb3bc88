#include <algorithm>

#include "ffi/cpu/cache/cache.h"
#include "ffi/cpu/cache/masks.h"
#include "ffi/cpu/prefetch.h"

namespace jax_tt {
namespace {

// Keys whose sets are prefetched together; their tags fit in the first-level cache.
constexpr int64_t kBatch = 64;
constexpr int64_t kBlock = 8 * kBatch;

template <typename K>
void Probe(const CacheShape& shape, const K* tags, const K* keys, int64_t n, int32_t* slots) {
  int64_t first[kBatch];
  for (int64_t i = 0; i < n; ++i) {
    first[i] = CacheSetOf(CacheHash(keys[i]), shape) * shape.ways;
    PrefetchLines(tags + first[i], std::min<int64_t>(shape.ways * static_cast<int64_t>(sizeof(K)), 256));
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t way = FindCacheTag(tags + first[i], shape.ways, keys[i]);
    slots[i] = keys[i] >= 0 && way < shape.ways ? static_cast<int32_t>(first[i] + way) : -1;
  }
}

}  // namespace

template <typename K>
Status CacheProbe(const CacheShape& shape, const K* tags, const K* keys, int64_t n, const Pool& pool, int32_t* slots) {
  Phases phases;
  phases.AddBlocks(n, kBlock, [=](int64_t i, int64_t end, int) {
    for (; i < end; i += kBatch) Probe(shape, tags, keys + i, std::min(kBatch, end - i), slots + i);
  });
  pool.Run(phases);
  return {};
}

template Status CacheProbe(const CacheShape&, const int32_t*, const int32_t*, int64_t, const Pool&, int32_t*);
template Status CacheProbe(const CacheShape&, const int64_t*, const int64_t*, int64_t, const Pool&, int32_t*);

}  // namespace jax_tt
