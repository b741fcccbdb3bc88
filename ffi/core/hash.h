// Tables of 64-bit keys: the directory, the sets of a key, scores and initial rows, for the kernels of every platform.
//
// jax_tt/_directories/hash_reference.py says what the ops do; these are its integers.
#pragma once

#include <stdint.h>

#include <optional>

#include "ffi/core/cache.h"
#include "ffi/core/host_device.h"

namespace jax_tt {

struct Status;
struct HashDirectoryArrays;

// Values of the attribute "policy", and their names.
enum class HashPolicy : int64_t { kNone = 0, kLru = 1, kLfu = 2, kEpochLru = 3, kEpochLfu = 4, kCustom = 5 };
constexpr const char* kHashPolicyNames[] = {"none", "lru", "lfu", "epoch_lru", "epoch_lfu", "custom"};

// The ways of a set have a bit each in a mask.
constexpr int64_t kMaxHashWays = 64;

// A word of 64 bits is two of 32, the high one first.
JAX_TT_INLINE uint64_t HashWord(uint32_t high, uint32_t low) { return static_cast<uint64_t>(high) << 32 | low; }
JAX_TT_INLINE uint64_t HashWord(const uint32_t* words, int64_t i) { return HashWord(words[2 * i], words[2 * i + 1]); }
JAX_TT_INLINE void SetHashWord(uint32_t* words, int64_t i, uint64_t word) {
  words[2 * i] = static_cast<uint32_t>(word >> 32);
  words[2 * i + 1] = static_cast<uint32_t>(word);
}

// The arrays of a directory.  An empty slot is one with touched 0, and is 0 in all of them.  Only MakeHashDirectory
// (ffi/common/hash_checks.h) makes one from sizes, so that no entrance lacks the checks of another.
struct HashDirectory {
  const int64_t sets, ways;
  uint32_t* const keys;    // [sets, 2, ways]
  uint32_t* const scores;  // [sets, 2, ways]
  int32_t* const touched;  // [sets, ways]

  JAX_TT_INLINE int64_t capacity() const { return sets * ways; }
  JAX_TT_INLINE uint64_t WordOf(const uint32_t* words, int64_t set, int64_t way) const {
    const int64_t at = 2 * set * ways + way;
    return HashWord(words[at], words[at + ways]);
  }
  JAX_TT_INLINE void SetWordOf(uint32_t* words, int64_t set, int64_t way, uint64_t word) const {
    const int64_t at = 2 * set * ways + way;
    words[at] = static_cast<uint32_t>(word >> 32);
    words[at + ways] = static_cast<uint32_t>(word);
  }
  // Whether a slot, which may be any number, has this key.
  JAX_TT_INLINE bool Holds(int32_t slot, uint64_t key) const {
    if (slot < 0 || slot >= capacity()) return false;
    const uint32_t set = static_cast<uint32_t>(slot) / static_cast<uint32_t>(ways);
    if (WordOf(keys, set, slot - set * ways) != key) return false;
    return key != 0 || touched[slot] > 0;  // empty slots are 0
  }
  // The same by slot.
  JAX_TT_INLINE uint64_t WordOf(const uint32_t* words, int64_t slot) const {
    return WordOf(words, slot / ways, slot % ways);
  }
  JAX_TT_INLINE void SetWordOf(uint32_t* words, int64_t slot, uint64_t word) const {
    SetWordOf(words, slot / ways, slot % ways, word);
  }

 private:
  friend Status MakeHashDirectory(int64_t sets, int64_t ways, const HashDirectoryArrays& arrays,
                                  std::optional<HashDirectory>* directory);
  HashDirectory(int64_t sets, int64_t ways, uint32_t* keys, uint32_t* scores, int32_t* touched)
      : sets(sets), ways(ways), keys(keys), scores(scores), touched(touched) {}
};

// The keys of a call.
struct HashBatch {
  const uint32_t* keys = nullptr;  // [n, 2]
  const bool* present = nullptr;   // [n]
  int64_t n = 0;
};

// The keys of an insertion and what their scores depend on.  The pointers are memory of the device.
struct HashRequests {
  HashBatch batch;
  const uint32_t* given = nullptr;  // [n, 2], only read under kCustom
  const int32_t* now = nullptr;     // [1]
  const uint32_t* epoch = nullptr;  // [1]
  HashPolicy policy = HashPolicy::kNone;
  int64_t min_age = 1;
};

// What an insertion did; jax_tt/_directories/hash_directory.py says what is in it.  What was there before is null if
// nobody asks.
struct HashInsertion {
  int32_t* slots = nullptr;        // [n]
  uint32_t* keys = nullptr;        // [n, 2]
  uint32_t* old_keys = nullptr;    // [n, 2]
  uint32_t* old_scores = nullptr;  // [n, 2]
  int32_t* old_touched = nullptr;  // [n]
  int32_t* counts = nullptr;       // [kHashCounts]
  int32_t* found = nullptr;        // [n]
};

// Elements of initial rows: a distribution, a seed and a factor.  The pointers are memory of the device.
struct HashInitialArrays {
  const int32_t* quantiles = nullptr;  // [kQuantiles]
  const uint32_t* seed = nullptr;      // [2]
  const float* scale = nullptr;        // [1]
  bool with_sign = false;
};

// An array whose entries are exchanged.
struct HashArray {
  char* entries = nullptr;     // [capacity] of entry_bytes each
  const char* from = nullptr;  // the new ones [n], or one number for all elements
  char* old = nullptr;         // [n], null if not asked for
  int64_t entry_bytes = 0, item_bytes = 0;
  bool constant = false;
};

// An array that grows with a directory.
struct HashGrown {
  const char* before = nullptr;
  char* after = nullptr;
  int64_t entry_bytes = 0;
};

// Remainders by the number of sets, with a multiplication in place of a division: with m = floor((2^32 - 1) / sets) the
// quotient floor(hash m / 2^32) is the right one or one less.
struct HashSets {
  uint32_t sets, factor;

  explicit JAX_TT_INLINE HashSets(int64_t sets)
      : sets(static_cast<uint32_t>(sets)), factor(UINT32_MAX / static_cast<uint32_t>(sets)) {}

  JAX_TT_INLINE uint32_t Of(uint32_t hash) const {
    const uint32_t quotient = static_cast<uint32_t>(static_cast<uint64_t>(hash) * factor >> 32);
    const uint32_t rest = hash - quotient * sets;
    return rest >= sets ? rest - sets : rest;
  }
};

// Hashes of a key, whose remainders are its first and its second set.
JAX_TT_INLINE uint32_t FirstHash(uint32_t high, uint32_t low) { return CacheMix(low ^ CacheMix(high)); }
JAX_TT_INLINE uint32_t SecondHash(uint32_t high, uint32_t low) { return CacheMix(high ^ CacheMix(low ^ 0x9E3779B9u)); }

// What scores take from a batch.
struct HashStamp {
  HashPolicy policy;
  uint32_t now, epoch;
};

// The score of a key after `count` requests, or, under kCustom, the largest score given with them.
JAX_TT_INLINE uint64_t HashScore(uint64_t score, uint32_t count, uint64_t given, const HashStamp& stamp) {
  const uint32_t low = static_cast<uint32_t>(score), room = ~low, counted = low + (count < room ? count : room);
  switch (stamp.policy) {
    case HashPolicy::kLru:
      return stamp.now;
    case HashPolicy::kLfu:
      return counted;
    case HashPolicy::kEpochLru:
      return HashWord(stamp.epoch, stamp.now);
    case HashPolicy::kEpochLfu:
      return HashWord(stamp.epoch, counted);
    case HashPolicy::kCustom:
      return given;
    default:
      return 0;
  }
}

// Order in which the new keys of a set take its places.
JAX_TT_INLINE bool HashEntersBefore(uint64_t score, uint64_t key, uint64_t other_score, uint64_t other_key) {
  return score > other_score || (score == other_score && key < other_key);
}

// Order in which the keys of a set are replaced.
struct HashLeaving {
  uint64_t score;
  int32_t touched;
  uint64_t key;

  JAX_TT_INLINE bool operator<(const HashLeaving& other) const {
    if (score != other.score) return score < other.score;
    if (touched != other.touched) return touched < other.touched;
    return key < other.key;
  }
};

// What the counts of an insertion are.
constexpr int kHashCounts = 7;
enum HashCounted {
  kHashRequests = 0,
  kHashHits = 1,
  kHashUnique = 2,
  kHashUniqueHits = 3,
  kHashInserted = 4,
  kHashEvicted = 5,
  kHashRefused = 6
};
constexpr const char* kHashCountedNames[kHashCounts] = {"requests", "hits",    "unique", "unique_hits",
                                                        "inserted", "evicted", "refused"};

// The table of quantiles of an initial distribution; jax_tt/_directories/initial.py says what is in it.
constexpr int kQuantileOctaves = 32, kQuantileSegments = 128;
constexpr int kQuantiles = kQuantileOctaves * (kQuantileSegments + 1);

// One round of Threefry-2x32, for words or vectors of words.
template <typename V>
JAX_TT_INLINE void ThreefryRound(int rotation, V* first, V* second) {
  *first = *first + *second;
  *second = ((*second << rotation) | (*second >> (32 - rotation))) ^ *first;
}

// Threefry-2x32 of the counter (*first, *second) under a key, in place; 20 rounds.
template <typename V>
JAX_TT_INLINE void Threefry(uint32_t high, uint32_t low, V* first, V* second) {
  const uint32_t key[3] = {high, low, high ^ low ^ 0x1BD11BDAu};
  *first = *first + high;
  *second = *second + low;
#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC unroll 5
#endif
  for (int group = 0; group < 5; ++group) {
    const bool odd = group % 2 == 1;
    ThreefryRound(odd ? 17 : 13, first, second);
    ThreefryRound(odd ? 29 : 15, first, second);
    ThreefryRound(odd ? 16 : 26, first, second);
    ThreefryRound(odd ? 24 : 6, first, second);
    *first = *first + key[(group + 1) % 3];
    *second = *second + (key[(group + 2) % 3] + static_cast<uint32_t>(group + 1));
  }
}

// An element of an initial row from its random bits, before it is multiplied by the scale.
JAX_TT_INLINE int32_t InitialElement(uint32_t bits, const int32_t* quantiles, bool with_sign) {
  uint32_t rest = bits << 1 | 1;
#if defined(__CUDA_ARCH__)
  const int octave = __clz(static_cast<int>(rest));
#else
  const int octave = __builtin_clz(rest);
#endif
  rest <<= octave;
  const int32_t place = octave * (kQuantileSegments + 1) + static_cast<int32_t>(rest >> 24 & (kQuantileSegments - 1));
  const uint32_t left = static_cast<uint32_t>(quantiles[place]), right = static_cast<uint32_t>(quantiles[place + 1]);
  const uint32_t part = rest >> 8 & 0xFFFFu;
  const int32_t more = static_cast<int32_t>((right - left) * part) >> 16;
  const int32_t whole = static_cast<int32_t>(left + static_cast<uint32_t>(more));
  return with_sign && bits >> 31 ? -whole : whole;
}

}  // namespace jax_tt
