// The row cache's directory and the arithmetic of its policy, for the kernels of every platform.
//
// jax_tt/_directories/cache_reference.py says what the policy is; these are its integers.
#pragma once

#include <stdint.h>

#include "ffi/core/host_device.h"

namespace jax_tt {

// Values of the attribute "policy", and their names.
enum class CachePolicy : int64_t { kLfu = 0, kLru = 1 };
constexpr const char* kCachePolicyNames[] = {"lfu", "lru"};

struct CacheShape {
  int64_t sets = 0, ways = 0;     // places for rows
  int64_t buckets = 0, room = 0;  // places for ghosts; a set has buckets / sets of the buckets, one behind the other

  JAX_TT_INLINE int64_t slots() const { return sets * ways; }
  JAX_TT_INLINE int64_t buckets_per_set() const { return buckets / sets; }
  JAX_TT_INLINE int64_t ghosts_per_set() const { return buckets_per_set() * room; }
};

// The arrays of a directory, with ids of type K (int32_t or int64_t).  An empty place holds -1 as its id and zeros
// elsewhere; kernels take every negative id for an empty place.
template <typename K>
struct CacheDirectory {
  CacheShape shape;
  const int32_t* clock = nullptr;    // [1]
  const int32_t* stamp = nullptr;    // [1] what scores take from a batch; only counting one looks at it
  K* tags = nullptr;                 // [sets, ways]; counting a batch leaves them as they are
  int32_t* scores = nullptr;         // [sets, ways]
  int32_t* touched = nullptr;        // [sets, ways]
  K* ghost_tags = nullptr;           // [buckets, room]
  int32_t* ghost_scores = nullptr;   // [buckets, room]
  int32_t* ghost_touched = nullptr;  // [buckets, room]
  int32_t* ghost_recent = nullptr;   // [buckets, room]
};

// The murmur3 finaliser of the words of an id; an id below 2^32 hashes alike in either width.
JAX_TT_INLINE uint32_t CacheMix(uint32_t word) {
  word = (word ^ (word >> 16)) * 0x85EBCA6Bu;
  word = (word ^ (word >> 13)) * 0xC2B2AE35u;
  return word ^ (word >> 16);
}
JAX_TT_INLINE uint32_t CacheHash(int32_t key) { return CacheMix(static_cast<uint32_t>(key)); }
JAX_TT_INLINE uint32_t CacheHash(int64_t key) {
  const uint64_t bits = static_cast<uint64_t>(key);
  return CacheMix(static_cast<uint32_t>(bits) ^ CacheMix(static_cast<uint32_t>(bits >> 32)));
}

// Set, bucket among those of its set, and bucket of an id by its hash.
JAX_TT_INLINE int64_t CacheSetOf(uint32_t hash, const CacheShape& shape) {
  return hash % static_cast<uint32_t>(shape.sets);
}
JAX_TT_INLINE int64_t CacheBucketInSet(uint32_t hash, const CacheShape& shape) {
  return hash / static_cast<uint32_t>(shape.sets) % static_cast<uint32_t>(shape.buckets_per_set());
}
JAX_TT_INLINE int64_t CacheBucketOf(uint32_t hash, const CacheShape& shape) {
  return CacheSetOf(hash, shape) * shape.buckets_per_set() + CacheBucketInSet(hash, shape);
}

// Whether observe counts a key as a request for the row in `slot`; every other slot means that it is not cached.
JAX_TT_INLINE bool CacheIsHit(int32_t slot, const CacheShape& shape) { return slot >= 0 && slot < shape.slots(); }

// Score after `count` more requests; jax_tt/_directories/scores.py says what the stamp is.
JAX_TT_INLINE int32_t CacheScore(int32_t score, int32_t count, int32_t stamp, CachePolicy policy) {
  constexpr int32_t kMostCounted = 1023;
  if (policy == CachePolicy::kLru) return stamp + (count < kMostCounted ? count : kMostCounted);
  const int64_t sum = score + static_cast<int64_t>(count) * stamp;
  return sum > INT32_MAX ? INT32_MAX : static_cast<int32_t>(sum);
}

// Order in which the ghosts and newcomers of a bucket compete for its room, best first.
template <typename K>
JAX_TT_INLINE bool CacheStaysBefore(int32_t score, K tag, int32_t other_score, K other_tag) {
  return score > other_score || (score == other_score && tag < other_tag);
}

// Score after an LFU bucket has aged by `cut`, the score of the first one beyond its room (0 where all have room, and
// never less); a ghost that has no more than 0 left is forgotten.  A score that no state can hold wraps.
JAX_TT_INLINE int32_t CacheAged(int32_t score, int32_t cut) {
  return static_cast<int32_t>(static_cast<uint32_t>(score) - static_cast<uint32_t>(cut));
}

// Whether a ghost is hotter than a row, and takes its slot.
JAX_TT_INLINE bool CacheIsHotter(int32_t score, int32_t touched, int32_t row_score, int32_t row_touched) {
  return score > row_score || (score == row_score && touched > row_touched);
}

// Order in which the ghosts of a set are let in, hottest first.  Only for places that are not empty.
template <typename K>
JAX_TT_INLINE bool CacheEntersBefore(int32_t score, int32_t touched, K tag, int32_t other_score, int32_t other_touched,
                                     K other_tag) {
  if (score != other_score) return score > other_score;
  if (touched != other_touched) return touched > other_touched;
  return tag < other_tag;
}

// Order in which the slots of a set are given away: the empty ones, the coldest, and last those that were touched in
// this step.  Of slots that this holds for equal the first one goes first.
struct CacheSlotRank {
  bool locked, held;
  int32_t score, touched;

  JAX_TT_INLINE bool operator<(const CacheSlotRank& other) const {
    if (locked != other.locked) return !locked;
    if (held != other.held) return !held;
    if (score != other.score) return score < other.score;
    return touched < other.touched;
  }
};
template <typename K>
JAX_TT_INLINE CacheSlotRank RankCacheSlot(K tag, int32_t score, int32_t touched, int32_t now) {
  return {tag >= 0 && touched == now, tag >= 0, score, touched};
}

// What the counts of observe and of populate are.
constexpr int kCacheCounts = 4;
enum CacheObserved { kCacheRequests = 0, kCacheUnique = 1, kCacheMisses = 2, kCacheUniqueMisses = 3 };
constexpr const char* kCacheObservedNames[kCacheCounts] = {"requested", "unique", "misses", "unique_misses"};
enum CachePopulated { kCacheInserted = 0, kCacheEvicted = 1, kCacheOutside = 2, kCacheOutsideRequests = 3 };
constexpr const char* kCachePopulatedNames[kCacheCounts] = {"inserted", "evicted", "conflict_unique_misses",
                                                            "conflict_misses"};

}  // namespace jax_tt
