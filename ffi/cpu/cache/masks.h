// Bit masks of the places, up to 64, that hold a given id or are empty.
//
// SSE2, which every x86-64 processor has, is sufficient: reading the tags from memory dominates.
#pragma once

#include <stdint.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace jax_tt {

constexpr int64_t kMaskPlaces = 64;

#if defined(__SSE2__)

// Masks of the lanes of one vector that equal the key, or are negative.
template <typename K>
struct CacheTagVector;

template <>
struct CacheTagVector<int32_t> {
  static constexpr int64_t kLanes = 4;
  static __m128i Spread(int32_t key) { return _mm_set1_epi32(key); }
  static int Negative(__m128i tags) { return _mm_movemask_ps(_mm_castsi128_ps(tags)); }
  static int Equal(__m128i tags, __m128i key) { return Negative(_mm_cmpeq_epi32(tags, key)); }
};

template <>
struct CacheTagVector<int64_t> {
  static constexpr int64_t kLanes = 2;
  static __m128i Spread(int64_t key) { return _mm_set1_epi64x(key); }
  static int Negative(__m128i tags) { return _mm_movemask_pd(_mm_castsi128_pd(tags)); }
  static int Equal(__m128i tags, __m128i key) {
    const __m128i same = _mm_cmpeq_epi32(tags, key);
    return Negative(_mm_and_si128(same, _mm_shuffle_epi32(same, 0xB1)));
  }
};

template <typename K, typename OfVector, typename OfPlace>
inline __attribute__((always_inline)) uint64_t CacheMask(const K* tags, int64_t count, OfVector of_vector,
                                                         OfPlace of_place) {
  constexpr int64_t kLanes = CacheTagVector<K>::kLanes;
  uint64_t mask = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    mask |= static_cast<uint64_t>(of_vector(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tags + i)))) << i;
  for (; i < count; ++i) mask |= static_cast<uint64_t>(of_place(tags[i])) << i;
  return mask;
}

template <typename K>
inline uint64_t EqualMask(const K* tags, int64_t count, K key) {
  const __m128i wanted = CacheTagVector<K>::Spread(key);
  return CacheMask(
      tags, count, [wanted](__m128i vector) { return CacheTagVector<K>::Equal(vector, wanted); },
      [key](K tag) { return tag == key; });
}

template <typename K>
inline uint64_t EmptyMask(const K* tags, int64_t count) {
  return CacheMask(
      tags, count, [](__m128i vector) { return CacheTagVector<K>::Negative(vector); }, [](K tag) { return tag < 0; });
}

#else

template <typename K>
inline uint64_t EqualMask(const K* tags, int64_t count, K key) {
  uint64_t mask = 0;
  for (int64_t i = 0; i < count; ++i) mask |= static_cast<uint64_t>(tags[i] == key) << i;
  return mask;
}

template <typename K>
inline uint64_t EmptyMask(const K* tags, int64_t count) {
  uint64_t mask = 0;
  for (int64_t i = 0; i < count; ++i) mask |= static_cast<uint64_t>(tags[i] < 0) << i;
  return mask;
}

#endif

// First of `count` places that holds `key`, or `count`.
template <typename K>
inline int64_t FindCacheTag(const K* tags, int64_t count, K key) {
  for (int64_t i = 0; i < count; i += kMaskPlaces) {
    const uint64_t mask = EqualMask(tags + i, count - i < kMaskPlaces ? count - i : kMaskPlaces, key);
    if (mask != 0) return i + __builtin_ctzll(mask);
  }
  return count;
}

}  // namespace jax_tt
