// A batch that is counted: its distinct ids and rows, and the newcomers of every bucket of ghosts.
//
// Where things stand in these tables depends on the order in which threads run, what stands in them does not.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "ffi/cuda/cache/cache.h"
#include "ffi/cuda/simt.h"
#include "ffi/cuda/tables/group_members.h"
#include "ffi/cuda/tables/open_table.h"
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

  // All zero at the start.
  int32_t* words = nullptr;     // [kCacheBatchWords]
  OpenTable<Item> items;        // the distinct items
  int32_t* requests = nullptr;  // of the item of an entry
  GroupMembers newcomers;  // by bucket the entries of ids that are not cached, whose ranks are not zero at the start

  int32_t* touched = nullptr;  // [n] buckets with newcomers
  // A list for every touched bucket, as long as it has newcomers.  That of the i-th one begins at i if it has one, and
  // else where `kListed` says, behind the first n: that word, shared by the whole GPU, is for the few.
  K* fresh_tags = nullptr;          // [2 n] newcomers that are no ghosts yet
  int32_t* fresh_counts = nullptr;  // [2 n] and their requests
  int32_t* free_places = nullptr;   // [2 n] where in the bucket they can go

  // With a null workspace only the sizes are of use.  Returns the bytes of the arrays that begin as zeros.
  int64_t Place(Workspace& workspace) {
    words = workspace.Take<int32_t>(kCacheBatchWords);
    items.Place(workspace, n);
    requests = workspace.Take<int32_t>(items.entries());
    newcomers.PlaceZeros(workspace, n, directory.shape.buckets);
    const int64_t zeros = workspace.bytes();
    newcomers.ranks = workspace.Take<int32_t>(items.entries());
    touched = workspace.Take<int32_t>(n);
    fresh_tags = workspace.Take<K>(2 * n);
    fresh_counts = workspace.Take<int32_t>(2 * n);
    free_places = workspace.Take<int32_t>(2 * n);
    return zeros;
  }

  JAX_TT_INLINE static Item OfSlot(int32_t slot) { return kRow + 1 + static_cast<Item>(slot); }
  JAX_TT_INLINE static Item OfKey(K key) { return static_cast<Item>(key) + 1; }
  JAX_TT_INLINE static bool IsRow(Item item) { return item > kRow; }
  JAX_TT_INLINE static int32_t SlotOf(Item item) { return static_cast<int32_t>(item - kRow - 1); }
  JAX_TT_INLINE static K KeyOf(Item item) { return static_cast<K>(item - 1); }

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)
  // The entry of a newcomer that there is.
  __device__ __forceinline__ unsigned FindNewcomer(int32_t bucket, int32_t rank) const {
    return newcomers.Find(bucket, rank, [this](unsigned entry) {
      return static_cast<int32_t>(CacheBucketOf(CacheHash(KeyOf(items.items[entry])), directory.shape));
    });
  }
#endif
};

}  // namespace jax_tt
