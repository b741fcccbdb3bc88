// Scores of rows of codes, from the partial scores that the codes of a row select.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "ffi/cpu/kernels/scan_kernels.h"

namespace jax_tt {

// The scores of kRows rows of bytes, in the order of their codes.
template <int kRows>
static inline __attribute__((always_inline)) void ScoreBytes(const ScanCodes& codes, const BestRows& best,
                                                             int64_t row) {
  const uint8_t* const from = codes.rows + row * codes.row_bytes;
  const float* partial = codes.partial;
  for (int64_t query = 0; query < codes.num_queries; ++query) {
    float score[kRows] = {};
    for (int64_t m = 0; m < codes.num_codes; ++m, partial += 256)
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) score[i] += partial[from[i * codes.row_bytes + m]];
    for (int i = 0; i < kRows; ++i)
      if (__builtin_expect(score[i] > best.threshold[query], 0)) Offer(best, query, codes.first_id + row + i, score[i]);
  }
}

static void ScanBytes(const ScanCodes& codes, const BestRows& best) {
  int64_t row = 0;
  for (; row + 8 <= codes.num_rows; row += 8) ScoreBytes<8>(codes, best, row);
  for (; row < codes.num_rows; ++row) ScoreBytes<1>(codes, best, row);
}

// Rows whose codes of four bits are looked up together.
constexpr int kHalfByteRows = 64;
#if defined(__AVX512BW__)
constexpr int kByteLanes = 64;
#elif defined(__AVX2__)
constexpr int kByteLanes = 32;
#else
constexpr int kByteLanes = 16;
#endif
typedef uint8_t ByteLanes __attribute__((vector_size(kByteLanes), aligned(1), may_alias));
typedef uint16_t PairLanes __attribute__((vector_size(kByteLanes), aligned(1), may_alias));

// Adds table[index] to each lane, of indices below 16.
static inline __attribute__((always_inline)) void AddSelected(const uint8_t* table, const ByteLanes& index,
                                                              ByteLanes* sum) {
#if defined(__AVX512BW__)
  const __m512i all = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  *sum += (ByteLanes)_mm512_shuffle_epi8(all, (__m512i)index);
#elif defined(__AVX2__)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  *sum += (ByteLanes)_mm256_shuffle_epi8(all, (__m256i)index);
#elif defined(__SSSE3__)
  *sum += (ByteLanes)_mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)), (__m128i)index);
#else
  for (int l = 0; l < kByteLanes; ++l) (*sum)[l] += table[index[l]];
#endif
}

// A bit for each lane that is at least the limit.
static inline __attribute__((always_inline)) uint32_t PairsFrom(const PairLanes& sums, const PairLanes& limit) {
#if defined(__AVX512BW__)
  return _mm512_cmpge_epu16_mask((__m512i)sums, (__m512i)limit);
#elif defined(__AVX2__)
  const __m256i from = _mm256_cmpeq_epi16(_mm256_max_epu16((__m256i)sums, (__m256i)limit), (__m256i)sums);
  const __m128i low = _mm256_castsi256_si128(from), high = _mm256_extracti128_si256(from, 1);
  return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
#else
  uint32_t from = 0;
  for (int l = 0; l < kByteLanes / 2; ++l) from |= static_cast<uint32_t>(sums[l] >= limit[l]) << l;
  return from;
#endif
}

// Swaps the upper part of each 2 * kBits bits of a with the lower part of those of b.
template <typename Word, int kBits>
static inline __attribute__((always_inline)) void SwapHalves(ByteLanes* a, ByteLanes* b) {
  typedef Word Words __attribute__((vector_size(kByteLanes), aligned(1), may_alias));
  constexpr Word kLow = static_cast<Word>((Word{1} << kBits) - 1);
  const Words x = (Words)*a, y = (Words)*b;
  *a = (ByteLanes)((x & kLow) | (y << kBits));
  *b = (ByteLanes)((x >> kBits) | (y & static_cast<Word>(~kLow)));
}

// Half bytes [2 * bytes, kHalfByteRows] of kHalfByteRows rows, of which each has up to eight bytes of `words`.  The
// half bytes of rows are in the order that RowAt tells.
static inline __attribute__((always_inline)) void TurnHalfBytes(const uint8_t* words, int64_t bytes, uint8_t* halves) {
  for (int v = 0; v < kHalfByteRows / kByteLanes; ++v) {
    ByteLanes lanes[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      lanes[i] = *reinterpret_cast<const ByteLanes*>(words + 8 * v * kByteLanes + i * kByteLanes);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) SwapHalves<uint16_t, 8>(&lanes[i], &lanes[i + 1]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      if ((i & 2) == 0) SwapHalves<uint32_t, 16>(&lanes[i], &lanes[i + 2]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) SwapHalves<uint64_t, 32>(&lanes[i], &lanes[i + 4]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      if (i >= bytes) break;
      *reinterpret_cast<ByteLanes*>(halves + 2 * i * kHalfByteRows + v * kByteLanes) = lanes[i] & uint8_t{15};
      *reinterpret_cast<ByteLanes*>(halves + (2 * i + 1) * kHalfByteRows + v * kByteLanes) = lanes[i] >> 4;
    }
  }
}

// The row at a place of half bytes that TurnHalfBytes has turned.
static inline __attribute__((always_inline)) int64_t RowAt(int64_t place) {
  const int64_t lane = place % kByteLanes;
  return place - lane + lane % 8 * (kByteLanes / 8) + lane / 8;
}

// Offers those rows among 64 at `row`, which are in the order of their half bytes, whose bits are set.
static __attribute__((noinline)) void OfferHalfBytes(const ScanCodes& codes, const BestRows& best,
                                                     const uint8_t* halves, int64_t row, int64_t query, uint64_t from) {
  const float* const partial = codes.partial + query * codes.num_codes * 16;
  const float before = best.threshold[query];
  for (; from != 0; from &= from - 1) {
    const int64_t place = __builtin_ctzll(from), at = row + RowAt(place);
    float score = 0;
    for (int64_t m = 0; m < codes.num_codes; ++m) score += partial[m * 16 + halves[m * kHalfByteRows + place]];
    if (at < codes.num_rows && score > best.threshold[query]) Offer(best, query, codes.first_id + at, score);
  }
  if (best.threshold[query] != before) codes.limit[query] = LimitOf(codes.bound[query], best.threshold[query]);
}

// A bit for each of the rows in half bytes [num_codes, kHalfByteRows] whose sum of bounds is at least the limit.
static inline __attribute__((always_inline)) uint64_t HalfBytesFrom(const uint8_t* bounds, int64_t num_codes,
                                                                    const uint8_t* halves, int32_t limit) {
  uint64_t found = 0;
#pragma GCC unroll 4
  for (int v = 0; v < kHalfByteRows / kByteLanes; ++v) {
    // Sums of pairs of lanes, in which the even lane is covered by the odd one's, and those of odd lanes.
    PairLanes both = {}, odd = {};
    const uint8_t* const lanes = halves + v * kByteLanes;
    int64_t m = 0;
    for (; m + 2 <= num_codes; m += 2) {
      ByteLanes two = {};
      AddSelected(bounds + m * 16, *reinterpret_cast<const ByteLanes*>(lanes + m * kHalfByteRows), &two);
      AddSelected(bounds + m * 16 + 16, *reinterpret_cast<const ByteLanes*>(lanes + (m + 1) * kHalfByteRows), &two);
      both += (PairLanes)two;
      odd += (PairLanes)two >> 8;
    }
    if (m < num_codes) {
      ByteLanes one = {};
      AddSelected(bounds + m * 16, *reinterpret_cast<const ByteLanes*>(lanes + m * kHalfByteRows), &one);
      both += (PairLanes)one;
      odd += (PairLanes)one >> 8;
    }
    const PairLanes least = PairLanes{} + static_cast<uint16_t>(limit);
    uint64_t even_from = PairsFrom(both - (odd << 8), least), odd_from = PairsFrom(odd, least);
    if (__builtin_expect((even_from | odd_from) == 0, 1)) continue;
    for (; even_from != 0; even_from &= even_from - 1)
      found |= uint64_t{1} << (v * kByteLanes + 2 * __builtin_ctzll(even_from));
    for (; odd_from != 0; odd_from &= odd_from - 1)
      found |= uint64_t{2} << (v * kByteLanes + 2 * __builtin_ctzll(odd_from));
  }
  return found;
}

static void ScanHalfBytes(const ScanCodes& codes, const BestRows& best) {
  uint8_t halves[(kMostBoundedCodes + 16) * kHalfByteRows];
  uint8_t words[8 * kHalfByteRows];
  for (int64_t row = 0; row < codes.num_rows; row += kHalfByteRows) {
    const int64_t count = codes.num_rows - row < kHalfByteRows ? codes.num_rows - row : kHalfByteRows;
    for (int64_t byte = 0; byte < codes.row_bytes; byte += 8) {
      const int64_t bytes = codes.row_bytes - byte < 8 ? codes.row_bytes - byte : 8;
      const uint8_t* from = codes.rows + row * codes.row_bytes + byte;
      const bool whole = codes.row_bytes == 8 && count == kHalfByteRows;
      if (!whole) {
        memset(words, 0, sizeof(words));
        for (int64_t i = 0; i < count; ++i, from += codes.row_bytes)
          memcpy(words + 8 * i, from, static_cast<size_t>(bytes));
      }
      TurnHalfBytes(whole ? from : words, bytes, halves + 2 * byte * kHalfByteRows);
    }
    for (int64_t query = 0; query < codes.num_queries; ++query) {
      const uint64_t found =
          HalfBytesFrom(codes.bounds + query * codes.num_codes * 16, codes.num_codes, halves, codes.limit[query]);
      if (__builtin_expect(found != 0, 0)) OfferHalfBytes(codes, best, halves, row, query, found);
    }
  }
}

}  // namespace jax_tt
