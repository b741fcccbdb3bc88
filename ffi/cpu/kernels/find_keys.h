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

// A mask of those of `count` <= 64 words that equal `word`.
static inline __attribute__((always_inline)) uint64_t EqualWords(const uint32_t* words, int64_t count, uint32_t word) {
  uint64_t mask = 0;
  int64_t i = 0;
#if defined(__AVX512F__)
  const __m512i wanted = _mm512_set1_epi32(static_cast<int>(word));
  for (; i < count; i += 16) {
    const __mmask16 valid = count - i >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (count - i)) - 1);
    mask |=
        static_cast<uint64_t>(_mm512_mask_cmpeq_epi32_mask(valid, _mm512_maskz_loadu_epi32(valid, words + i), wanted))
        << i;
  }
#else
#if defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi32(static_cast<int>(word));
  for (; i + 8 <= count; i += 8) {
    const __m256i same = _mm256_cmpeq_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i)), wanted);
    mask |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(same))) << i;
  }
#elif defined(__SSE2__)
  const __m128i wanted = _mm_set1_epi32(static_cast<int>(word));
  for (; i + 4 <= count; i += 4) {
    const __m128i same = _mm_cmpeq_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i)), wanted);
    mask |= static_cast<uint64_t>(_mm_movemask_ps(_mm_castsi128_ps(same))) << i;
  }
#endif
  for (; i < count; ++i) mask |= static_cast<uint64_t>(words[i] == word) << i;
#endif
  return mask;
}

// The slot of a key in a set, or -1.  An empty slot looks like one with the key 0.
static inline __attribute__((always_inline)) int32_t FindInSet(const HashDirectory& directory, int64_t set,
                                                               uint32_t high, uint32_t low) {
  const int64_t ways = directory.ways;
  const uint32_t* highs = directory.keys + 2 * set * ways;
  for (uint64_t mask = EqualWords(highs + ways, ways, low); mask != 0; mask &= mask - 1) {
    const int64_t way = __builtin_ctzll(mask), slot = set * ways + way;
    if (highs[way] == high && ((high | low) != 0 || directory.touched[slot] > 0)) return static_cast<int32_t>(slot);
  }
  return -1;
}

static inline __attribute__((always_inline)) void PrefetchSet(const HashDirectory& directory, int64_t set) {
  const char* words = reinterpret_cast<const char*>(directory.keys + 2 * set * directory.ways);
  for (int64_t offset = 0; offset < 8 * directory.ways; offset += 64) __builtin_prefetch(words + offset);
}

// The first sets of some keys are prefetched together, then, for those that are not found there, the second ones: a
// prefetch of both would read twice as much memory.
static void FindKeys(const HashDirectory& directory, const uint32_t* keys, const bool* present, int64_t n,
                     int32_t* slots) {
  constexpr int64_t kTogether = 64;
  const HashSets sets(directory.sets);
  uint32_t set[kTogether];
  int32_t left[kTogether];
  for (; n > 0; n -= kTogether, keys += 2 * kTogether, present += kTogether, slots += kTogether) {
    const int64_t count = n < kTogether ? n : kTogether;
    for (int64_t i = 0; i < count; ++i) set[i] = sets.Of(FirstHash(keys[2 * i], keys[2 * i + 1]));
    for (int64_t i = 0; i < count; ++i) PrefetchSet(directory, set[i]);
    int64_t remain = 0;
    for (int64_t i = 0; i < count; ++i) {
      slots[i] = present[i] ? FindInSet(directory, set[i], keys[2 * i], keys[2 * i + 1]) : -1;
      left[remain] = static_cast<int32_t>(i);
      remain += present[i] && slots[i] < 0;
    }
    for (int64_t k = 0; k < remain; ++k) {
      const int64_t i = left[k];
      set[k] = sets.Of(SecondHash(keys[2 * i], keys[2 * i + 1]));
      PrefetchSet(directory, set[k]);
    }
    for (int64_t k = 0; k < remain; ++k) {
      const int64_t i = left[k];
      slots[i] = FindInSet(directory, set[k], keys[2 * i], keys[2 * i + 1]);
    }
  }
}

}  // namespace jax_tt

#endif  // JAX_TT_CPU_KERNELS_FIND_KEYS_H_
