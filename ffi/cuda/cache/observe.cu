#include <algorithm>

#include "ffi/cuda/cache/batch.h"
#include "ffi/cuda/cache/bucket.h"
#include "ffi/cuda/cache/cache.h"
#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/lanes.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {
namespace {

// Small blocks, so that an ordinary batch is spread over the whole GPU.
constexpr int kTallyThreads = 128;
constexpr int kSettleThreads = 256;
// A few times what fits on a large GPU at once; from there on a warp takes several buckets.
constexpr int64_t kMaxSettleBlocks = 2048;

// One thread an id: the distinct items with their requests, and the newcomers of every bucket.
template <typename K>
__global__ void __launch_bounds__(kTallyThreads) TallyBatch(const __grid_constant__ CacheBatch<K> batch) {
  using Batch = CacheBatch<K>;
  const CacheShape& shape = batch.directory.shape;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kTallyThreads) + threadIdx.x;
  const int lane = threadIdx.x % 32;
  const K key = i < batch.n ? batch.keys[i] : K{-1};
  const int32_t slot = i < batch.n ? batch.slots[i] : -1;
  const bool hit = CacheIsHit(slot, shape), missed = key >= 0 && !hit;

  // Equal items of a warp are counted as one.
  const typename Batch::Item item = hit ? Batch::OfSlot(slot) : missed ? Batch::OfKey(key) : 0;
  const unsigned same = __match_any_sync(kAllLanes, item);
  bool made = false, first_of_bucket = false;
  int32_t bucket = 0;
  if (item != 0 && lane == __ffs(static_cast<int>(same)) - 1) {
    const uint32_t hash = hit ? CacheMix(static_cast<uint32_t>(slot)) : CacheHash(key);
    const auto entered = batch.items.Enter(item, hash);
    made = entered.made;
    atomicAdd(batch.requests + entered.entry, __popc(same));
    if (made && missed) {
      bucket = static_cast<int32_t>(CacheBucketOf(hash, shape));
      first_of_bucket = batch.newcomers.Add(bucket, entered.entry) == 0;
    }
  }
  const unsigned firsts = __ballot_sync(kAllLanes, first_of_bucket);
  if (firsts != 0) {
    int32_t begin = lane == 0 ? atomicAdd(batch.words + kTouchedBuckets, __popc(firsts)) : 0;
    begin = __shfl_sync(kAllLanes, begin, 0);
    if (first_of_bucket) batch.touched[begin + __popc(firsts & ((1u << lane) - 1))] = bucket;
  }

  int32_t counts[kCacheCounts];
  counts[kCacheRequests] = __syncthreads_count(key >= 0);
  counts[kCacheUnique] = __syncthreads_count(made);
  counts[kCacheMisses] = __syncthreads_count(missed);
  counts[kCacheUniqueMisses] = __syncthreads_count(made && missed);
  if (threadIdx.x == 0)
    for (int k = 0; k < kCacheCounts; ++k) atomicAdd(batch.words + k, counts[k]);
}

// Rows that were asked for, a thread each; buckets with newcomers, a warp each.  Told that five blocks on a
// multiprocessor are enough, the compiler does not spill registers to fit in more.
template <typename K>
__global__ void __launch_bounds__(kSettleThreads, 5)
    SettleBatch(const __grid_constant__ CacheBatch<K> batch, int32_t* counts) {
  const int64_t thread = blockIdx.x * static_cast<int64_t>(kSettleThreads) + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kSettleThreads;
  const CacheDirectory<K>& directory = batch.directory;
  const int32_t now = *directory.clock, stamp = *directory.stamp;
  if (thread < kCacheCounts) counts[thread] = batch.words[thread];

  for (int64_t entry = thread; entry < batch.items.entries(); entry += threads) {
    const auto item = batch.items.items[entry];
    if (!CacheBatch<K>::IsRow(item)) continue;
    const int32_t slot = CacheBatch<K>::SlotOf(item);
    directory.scores[slot] = CacheScore(directory.scores[slot], batch.requests[entry], stamp, batch.policy);
    directory.touched[slot] = now;
  }
  const int32_t touched = batch.words[kTouchedBuckets];
  for (int64_t i = thread / 32; i < touched; i += threads / 32) Bucket<K>(batch, i, now, stamp).Settle();
}

}  // namespace

int64_t CacheObserveWorkspace(int64_t n, const CacheShape& shape) {
  CacheBatch<int64_t> batch;  // wider ids need more
  batch.directory.shape = shape;
  batch.n = n;
  Workspace workspace(nullptr);
  batch.Place(workspace);
  return workspace.bytes();
}

template <typename K>
Status CacheObserve(cudaStream_t stream, const CacheDirectory<K>& directory, CachePolicy policy, const K* keys,
                    const int32_t* slots, int64_t n, int32_t* counts, void* workspace) {
  CacheBatch<K> batch;
  batch.directory = directory;
  batch.policy = policy;
  batch.keys = keys;
  batch.slots = slots;
  batch.n = n;
  Workspace memory(workspace);
  const int64_t zeros = batch.Place(memory);
  JAX_TT_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(workspace, 0, static_cast<size_t>(zeros), stream)));
  JAX_TT_RETURN_IF_ERROR(
      Launch(stream, (n + kTallyThreads - 1) / kTallyThreads, kTallyThreads, 0, TallyBatch<K>, batch));
  constexpr int64_t kWarps = kSettleThreads / 32;
  const int64_t blocks = std::clamp((n + kWarps - 1) / kWarps, int64_t{1}, kMaxSettleBlocks);
  return Launch(stream, blocks, kSettleThreads, 0, SettleBatch<K>, batch, counts);
}

template Status CacheObserve(cudaStream_t, const CacheDirectory<int32_t>&, CachePolicy, const int32_t*, const int32_t*,
                             int64_t, int32_t*, void*);
template Status CacheObserve(cudaStream_t, const CacheDirectory<int64_t>&, CachePolicy, const int64_t*, const int32_t*,
                             int64_t, int32_t*, void*);

int64_t CacheWorkspace(std::string_view op, int64_t n, const CacheShape& shape) {
  if (shape.sets < 1) return 0;  // the handlers refuse it
  return op == "observe" ? CacheObserveWorkspace(n, shape) : op == "populate" ? CachePopulateWorkspace(shape) : 0;
}

}  // namespace jax_tt
