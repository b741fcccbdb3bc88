// Search of keys in the sets of a directory, for the instruction set that it is compiled for.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#ifndef JAX_TT_CPU_KERNELS_FIND_KEYS_H_
#define JAX_TT_CPU_KERNELS_FIND_KEYS_H_

#include <stdint.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "ffi/core/hash.h"

namespace jax_tt {

// A mask of those of `count` <= 64 words that equal `word`.  No vector reaches beyond the words, where another cache
// line may begin; a masked one would still read it.
static inline __attribute__((always_inline)) uint64_t EqualWords(const uint32_t* words, int64_t count, uint32_t word) {
  uint64_t mask = 0;
  int64_t i = 0;
#if defined(__AVX512F__)
  const __m512i sixteen = _mm512_set1_epi32(static_cast<int>(word));
  for (; i + 16 <= count; i += 16)
    mask |= static_cast<uint64_t>(_mm512_cmpeq_epi32_mask(_mm512_loadu_si512(words + i), sixteen)) << i;
#endif
#if defined(__AVX2__)
  const __m256i eight = _mm256_set1_epi32(static_cast<int>(word));
  for (; i + 8 <= count; i += 8) {
    const __m256i same = _mm256_cmpeq_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i)), eight);
    mask |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(same))) << i;
  }
#endif
#if defined(__SSE2__)
  const __m128i four = _mm_set1_epi32(static_cast<int>(word));
  for (; i + 4 <= count; i += 4) {
    const __m128i same = _mm_cmpeq_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i)), four);
    mask |= static_cast<uint64_t>(_mm_movemask_ps(_mm_castsi128_ps(same))) << i;
  }
#endif
  for (; i < count; ++i) mask |= static_cast<uint64_t>(words[i] == word) << i;
  return mask;
}

// The slot of a key in a set, or -1.  Without a branch that depends on it: whether a key is in its first or in its
// second set cannot be predicted.
static inline __attribute__((always_inline)) int32_t FindInSet(const HashDirectory& directory, int64_t set,
                                                               uint32_t high, uint32_t low) {
  const int64_t ways = directory.ways;
  const uint32_t* words = directory.keys + 2 * set * ways;
  uint64_t mask = EqualWords(words, ways, high) & EqualWords(words + ways, ways, low);
  if ((high | low) == 0) {  // as empty slots are
    uint64_t taken = 0;
    for (int64_t way = 0; way < ways; ++way)
      taken |= static_cast<uint64_t>(directory.touched[set * ways + way] > 0) << way;
    mask &= taken;
  }
  const int64_t way = __builtin_ctzll(mask | uint64_t{1} << 63);
  return mask != 0 ? static_cast<int32_t>(set * ways + way) : -1;
}

static inline __attribute__((always_inline)) void PrefetchSet(const HashDirectory& directory, int64_t set) {
  const char* words = reinterpret_cast<const char*>(directory.keys + 2 * set * directory.ways);
  for (int64_t offset = 0; offset < 8 * directory.ways; offset += 64) __builtin_prefetch(words + offset);
}

// Keys that are searched together, in three steps.  Those of three groups alternate, so that what one of them
// prefetches arrives while others work.
struct KeyGroup {
  static constexpr int64_t kKeys = 32;
  const uint32_t* keys;
  const bool* present;
  int32_t* slots;
  int64_t count, remain;
  uint32_t first[kKeys], second[kKeys];
  int32_t left[kKeys];  // the `remain` keys that are not in their first set

  __attribute__((always_inline)) void Start(const HashDirectory& directory, const HashSets& sets) {
    for (int64_t i = 0; i < count; ++i) first[i] = sets.Of(FirstHash(keys[2 * i], keys[2 * i + 1]));
    for (int64_t i = 0; i < count; ++i) PrefetchSet(directory, first[i]);
    for (int64_t i = 0; i < count; ++i) second[i] = sets.Of(SecondHash(keys[2 * i], keys[2 * i + 1]));
  }

  // A prefetch of both sets at once would read twice as much memory.
  __attribute__((always_inline)) void SearchFirst(const HashDirectory& directory) {
    remain = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t slot = FindInSet(directory, first[i], keys[2 * i], keys[2 * i + 1]);
      slots[i] = present[i] ? slot : -1;
      left[remain] = static_cast<int32_t>(i);
      remain += present[i] & (slot < 0);
    }
    for (int64_t k = 0; k < remain; ++k) PrefetchSet(directory, second[left[k]]);
  }

  __attribute__((always_inline)) void SearchSecond(const HashDirectory& directory) {
    for (int64_t k = 0; k < remain; ++k) {
      const int64_t i = left[k];
      slots[i] = FindInSet(directory, second[i], keys[2 * i], keys[2 * i + 1]);
    }
  }
};

static void FindKeys(const HashDirectory& directory, const uint32_t* keys, const bool* present, int64_t n,
                     int32_t* slots) {
  constexpr int64_t kKeys = KeyGroup::kKeys;
  const HashSets sets(directory.sets);
  const int64_t groups = (n + kKeys - 1) / kKeys;
  KeyGroup ring[3];
  for (int64_t g = 0; g < groups + 2; ++g) {
    if (g < groups) {
      const int64_t begin = g * kKeys;
      KeyGroup& group = ring[g % 3];
      group.keys = keys + 2 * begin;
      group.present = present + begin;
      group.slots = slots + begin;
      group.count = n - begin < kKeys ? n - begin : kKeys;
      group.Start(directory, sets);
    }
    if (g >= 1 && g - 1 < groups) ring[(g - 1) % 3].SearchFirst(directory);
    if (g >= 2) ring[(g - 2) % 3].SearchSecond(directory);
  }
}

}  // namespace jax_tt

#endif  // JAX_TT_CPU_KERNELS_FIND_KEYS_H_
