// A batch that is counted: its distinct ids and rows, and the newcomers of every bucket of ghosts.
//
// Where things stand in these tables depends on the order in which threads run, what stands in them does not.
#ifndef JAX_TT_CUDA_CACHE_BATCH_H_
#define JAX_TT_CUDA_CACHE_BATCH_H_

#include <stdint.h>

#include <type_traits>

#include "ffi/cuda/cache.h"
#include "ffi/cuda/simt.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {

// Words that all blocks share: the counts of the batch, then these.
enum CacheBatchWord { kTouchedBuckets = kCacheCounts, kListed, kCacheBatchWords };

// Passed to kernels by value.
template <typename K>
struct CacheBatch {
  // What was asked for, as one word that is never 0: a cached row by its slot, another one by its id.
  using Item = std::conditional_t<sizeof(K) == 4, unsigned, unsigned long long>;
  static constexpr Item kRow = Item{1} << (8 * sizeof(K) - 1);

  CacheDirectory<K> directory;
  CachePolicy policy = CachePolicy::kLfu;
  const K* keys = nullptr;         // [n]
  const int32_t* slots = nullptr;  // [n]
  int64_t n = 0;
  int bits = 1;  // the tables have 2^bits entries, at least twice as many as there can be items

  // All zero at the start.
  int32_t* words = nullptr;         // [kCacheBatchWords]
  Item* items = nullptr;            // [entries] the distinct items
  int32_t* requests = nullptr;      // [entries] of an item
  unsigned* newcomers = nullptr;    // [entries] where the r-th newcomer of a bucket is among the items, plus 1
  int32_t* bucket_sizes = nullptr;  // [buckets] newcomers of a bucket; "newcomer": an id that is not cached

  int32_t* ranks = nullptr;    // [entries] number of a newcomer in its bucket
  int32_t* touched = nullptr;  // [n] buckets with newcomers
  // A list for every touched bucket, as long as it has newcomers.  That of the i-th one begins at i if it has one, and
  // else where `kListed` says, behind the first n: that word, shared by the whole GPU, is for the few.
  K* fresh_tags = nullptr;          // [2 n] newcomers that are no ghosts yet
  int32_t* fresh_counts = nullptr;  // [2 n] and their requests
  int32_t* free_places = nullptr;   // [2 n] where in the bucket they can go

  // With a null workspace only the sizes are of use.  Returns the bytes of the arrays that begin as zeros.
  int64_t Place(Workspace& workspace) {
    while (entries() < 2 * n) ++bits;
    words = workspace.Take<int32_t>(kCacheBatchWords);
    items = workspace.Take<Item>(entries());
    requests = workspace.Take<int32_t>(entries());
    newcomers = workspace.Take<unsigned>(entries());
    bucket_sizes = workspace.Take<int32_t>(directory.shape.buckets);
    const int64_t zeros = workspace.bytes();
    ranks = workspace.Take<int32_t>(entries());
    touched = workspace.Take<int32_t>(n);
    fresh_tags = workspace.Take<K>(2 * n);
    fresh_counts = workspace.Take<int32_t>(2 * n);
    free_places = workspace.Take<int32_t>(2 * n);
    return zeros;
  }

  JAX_TT_INLINE int64_t entries() const { return int64_t{1} << bits; }

  JAX_TT_INLINE static Item OfSlot(int32_t slot) { return kRow + 1 + static_cast<Item>(slot); }
  JAX_TT_INLINE static Item OfKey(K key) { return static_cast<Item>(key) + 1; }
  JAX_TT_INLINE static bool IsRow(Item item) { return item > kRow; }
  JAX_TT_INLINE static int32_t SlotOf(Item item) { return static_cast<int32_t>(item - kRow - 1); }
  JAX_TT_INLINE static K KeyOf(Item item) { return static_cast<K>(item - 1); }

  // Ids of one set have the remainder of their hashes in common, so these take the top bits of what mixes all.
  JAX_TT_INLINE unsigned Start(uint32_t hash) const { return hash * 0x9E3779B9u >> (32 - bits); }
  JAX_TT_INLINE unsigned StartOfNewcomer(int32_t bucket, int32_t rank) const {
    return CacheMix(static_cast<uint32_t>(bucket) + static_cast<uint32_t>(rank) * 0x9E3779B9u) >> (32 - bits);
  }
  JAX_TT_INLINE unsigned Next(unsigned entry) const { return (entry + 1) & static_cast<unsigned>(entries() - 1); }

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)
  // The entry of an item, which is made where there is none.
  __device__ __forceinline__ unsigned Enter(Item item, uint32_t hash, bool* made) const {
    for (unsigned entry = Start(hash);; entry = Next(entry)) {
      const Item seen = atomicCAS(items + entry, Item{0}, item);
      *made = seen == 0;
      if (seen == 0 || seen == item) return entry;
    }
  }

  // Adds a new item to the newcomers of its bucket.  Returns whether it is the first one.
  __device__ __forceinline__ bool AddNewcomer(int32_t bucket, unsigned entry) const {
    const int32_t rank = atomicAdd(bucket_sizes + bucket, 1);
    ranks[entry] = rank;
    unsigned at = StartOfNewcomer(bucket, rank);
    while (atomicCAS(newcomers + at, 0u, entry + 1) != 0) at = Next(at);
    return rank == 0;
  }

  // The entry of a newcomer that there is.
  __device__ __forceinline__ unsigned FindNewcomer(int32_t bucket, int32_t rank) const {
    for (unsigned at = StartOfNewcomer(bucket, rank);; at = Next(at)) {
      const unsigned entry = newcomers[at] - 1;
      if (ranks[entry] == rank && CacheBucketOf(CacheHash(KeyOf(items[entry])), directory.shape) == bucket)
        return entry;
    }
  }
#endif
};

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_CACHE_BATCH_H_
