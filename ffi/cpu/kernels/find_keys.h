// Search of keys in the sets of a directory, for the instruction set that it is compiled for.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#pragma once

#include <stdint.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "ffi/core/hash.h"

namespace jax_tt {

// A mask of those of `ways` <= 64 keys whose words are `high` and `low`: word i of a key is words[i * ways + way].  No
// vector reaches beyond the words, where another cache line may begin; a masked one would still read it.
static inline __attribute__((always_inline)) uint64_t SameKeys(const uint32_t* words, int64_t ways, uint32_t high,
                                                               uint32_t low) {
  uint64_t mask = 0;
  int64_t way = 0;
#if defined(__AVX512F__)
  for (; way + 16 <= ways; way += 16) {
    const __m512i highs = _mm512_loadu_si512(words + way), lows = _mm512_loadu_si512(words + ways + way);
    const __mmask16 same = _mm512_cmpeq_epi32_mask(highs, _mm512_set1_epi32(static_cast<int>(high)));
    mask |= static_cast<uint64_t>(_mm512_mask_cmpeq_epi32_mask(same, lows, _mm512_set1_epi32(static_cast<int>(low))))
            << way;
  }
#endif
#if defined(__AVX2__)
  for (; way + 8 <= ways; way += 8) {
    const __m256i highs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + way)),
                  lows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + ways + way));
    const __m256i same = _mm256_and_si256(_mm256_cmpeq_epi32(highs, _mm256_set1_epi32(static_cast<int>(high))),
                                          _mm256_cmpeq_epi32(lows, _mm256_set1_epi32(static_cast<int>(low))));
    mask |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(same))) << way;
  }
#endif
#if defined(__SSE2__)
  for (; way + 4 <= ways; way += 4) {
    const __m128i highs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + way)),
                  lows = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + ways + way));
    const __m128i same = _mm_and_si128(_mm_cmpeq_epi32(highs, _mm_set1_epi32(static_cast<int>(high))),
                                       _mm_cmpeq_epi32(lows, _mm_set1_epi32(static_cast<int>(low))));
    mask |= static_cast<uint64_t>(_mm_movemask_ps(_mm_castsi128_ps(same))) << way;
  }
#endif
  for (; way < ways; ++way) mask |= static_cast<uint64_t>((words[way] == high) & (words[ways + way] == low)) << way;
  return mask;
}

// The ways of a set that have a key.
static __attribute__((noinline)) uint64_t TakenWays(const HashDirectory& directory, int64_t set) {
  uint64_t taken = 0;
  for (int64_t way = 0; way < directory.ways; ++way)
    taken |=
        static_cast<uint64_t>(__atomic_load_n(directory.touched + set * directory.ways + way, __ATOMIC_RELAXED) > 0)
        << way;
  return taken;
}

// The slot of a key in a set, or -1.  Without a branch that depends on it: whether a key is in its first or in its
// second set cannot be predicted.  Here and below, kWays is the number of ways, or 0 if it is not known before.
template <int kWays>
static inline __attribute__((always_inline)) int32_t FindInSet(const HashDirectory& directory, int64_t set,
                                                               uint32_t high, uint32_t low) {
  const int64_t ways = kWays > 0 ? kWays : directory.ways;
  uint64_t mask = SameKeys(directory.keys + 2 * set * ways, ways, high, low);
  if (__builtin_expect((high | low) == 0, 0)) mask &= TakenWays(directory, set);  // empty slots have this key
  const int64_t way = __builtin_ctzll(mask | uint64_t{1} << 63);
  return static_cast<int32_t>(set * ways + way) | -static_cast<int32_t>(mask == 0);
}

template <int kWays>
static inline __attribute__((always_inline)) void PrefetchSet(const HashDirectory& directory, int64_t set) {
  const int64_t ways = kWays > 0 ? kWays : directory.ways;
  const char* words = reinterpret_cast<const char*>(directory.keys + 2 * set * ways);
  for (int64_t offset = 0; offset < 8 * ways; offset += 64) __builtin_prefetch(words + offset);
}

// Keys that are searched together, in three steps.  Those of three groups alternate, so that what one of them
// prefetches arrives while others work.
template <int kWays>
struct KeyGroup {
  static constexpr int64_t kKeys = 16;
  const uint32_t* keys;
  const bool* present;
  int32_t* slots;
  int64_t count, remain;
  uint32_t first[kKeys], second[kKeys];
  int32_t left[kKeys];  // the `remain` keys that are not in their first set

  __attribute__((always_inline)) void Start(const HashDirectory& directory, const HashSets& sets) {
    for (int64_t i = 0; i < count; ++i) first[i] = sets.Of(FirstHash(keys[2 * i], keys[2 * i + 1]));
    for (int64_t i = 0; i < count; ++i) PrefetchSet<kWays>(directory, first[i]);
    for (int64_t i = 0; i < count; ++i) second[i] = sets.Of(SecondHash(keys[2 * i], keys[2 * i + 1]));
  }

  // A prefetch of both sets at once would read twice as much memory.
  __attribute__((always_inline)) void SearchFirst(const HashDirectory& directory) {
    remain = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t slot = FindInSet<kWays>(directory, first[i], keys[2 * i], keys[2 * i + 1]);
      slots[i] = slot | -static_cast<int32_t>(!present[i]);
      left[remain] = static_cast<int32_t>(i);
      remain += present[i] & (slot < 0);
    }
    for (int64_t k = 0; k < remain; ++k) PrefetchSet<kWays>(directory, second[left[k]]);
  }

  __attribute__((always_inline)) void SearchSecond(const HashDirectory& directory) {
    for (int64_t k = 0; k < remain; ++k) {
      const int64_t i = left[k];
      slots[i] = FindInSet<kWays>(directory, second[i], keys[2 * i], keys[2 * i + 1]);
    }
  }
};

template <int kWays>
static void FindKeysIn(const HashDirectory& directory, const uint32_t* keys, const bool* present, int64_t n,
                       int32_t* slots) {
  using Group = KeyGroup<kWays>;
  constexpr int64_t kKeys = Group::kKeys;
  const HashSets sets(directory.sets);
  const int64_t groups = (n + kKeys - 1) / kKeys;
  Group ring[3];
  for (int64_t g = 0; g < groups + 2; ++g) {
    if (g < groups) {
      const int64_t begin = g * kKeys;
      Group& group = ring[g % 3];
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

static void FindKeys(const HashDirectory& directory, const uint32_t* keys, const bool* present, int64_t n,
                     int32_t* slots) {
  const auto find = directory.ways == 8 ? FindKeysIn<8> : FindKeysIn<0>;  // 8 is the default of tables
  find(directory, keys, present, n, slots);
}

}  // namespace jax_tt
