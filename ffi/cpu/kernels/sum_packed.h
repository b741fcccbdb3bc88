// Sums of quantized rows, for the instruction set that it is compiled for.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "ffi/core/half.h"
#include "ffi/core/packed_rows.h"
#include "ffi/cpu/kernels/quantized_kernels.h"

namespace jax_tt {

// W lanes; the widest for which an instruction set has registers, and 8 numbers always take whole bytes.
template <int W>
struct Lanes {
  typedef float Floats __attribute__((vector_size(4 * W), aligned(4), may_alias));
  typedef uint32_t Words __attribute__((vector_size(4 * W)));
  typedef int32_t Ints __attribute__((vector_size(4 * W)));
};
#if defined(__AVX512F__)
constexpr int kPackedLanes = 16;
#else
constexpr int kPackedLanes = 8;
#endif

// The scale and the offset of a row.
static inline __attribute__((always_inline)) void ReadHeader(const uint8_t* row, float* scale, float* offset) {
  float16 both[2];
  memcpy(both, row, sizeof(both));
#if defined(__F16C__)
  // Unlike arithmetic, it never takes subnormal numbers for 0.
  const __m128i halves = _mm_cvtsi32_si128(both[0].bits | both[1].bits << 16);
  const __m128 floats = _mm_cvtph_ps(halves);
  *scale = floats[0];
  *offset = floats[1];
#else
  *scale = ToCompute(both[0]);
  *offset = ToCompute(both[1]);
#endif
}

// The word whose highest bytes are the `bytes` bytes at `codes`.  What is before them belongs to the row as well, as it
// begins with its scale and offset.
template <int kBytes>
static inline __attribute__((always_inline)) uint32_t WordThatEnds(const uint8_t* codes) {
  uint32_t word;
  memcpy(&word, codes + kBytes - 4, sizeof(word));
  return word;
}

// Whether eight numbers select what they stand for at least as fast as it is computed of uniform levels.
#if defined(__AVX2__)
template <int kBits>
constexpr bool kSelectsFast = kBits < 4;
#else
template <int kBits>
constexpr bool kSelectsFast = false;
#endif

// Turns the next W numbers of a row into floats.  Results are written to memory, as vectors that an instruction set
// does not have cannot be returned.  kUniform: numbers stand for themselves, which only decoders are told that are
// faster then.
template <int kBits, int W, bool kUniform>
struct RowDecoder {
  static_assert(kBits < 8 && W == 8);
  typedef typename Lanes<W>::Floats Floats;
  typedef typename Lanes<W>::Words Words;
  typedef typename Lanes<W>::Ints Ints;

  float scale, offset;
  const PackedLevels* levels;
  Floats low, high;  // of numbers by their lowest three bits, and of those of four bits from 8 on

  inline __attribute__((always_inline)) void Start(const PackedLevels& of_table) {
    levels = &of_table;
    if constexpr (!kUniform) {
      low = scale * *reinterpret_cast<const Floats*>(levels->at) + offset;
      high = scale * *reinterpret_cast<const Floats*>(levels->at + W) + offset;
    }
  }
  inline __attribute__((always_inline)) void Read(const uint8_t* codes, Floats* out) const {
    constexpr uint32_t b = kBits, first = 32 - 8 * b;
    const Words shifts = {first,         first + b,     first + 2 * b, first + 3 * b,
                          first + 4 * b, first + 5 * b, first + 6 * b, first + 7 * b};
    // The lowest bits are those of a number, the others belong to the next ones.
    const Words words = (Words{} + WordThatEnds<kBits>(codes)) >> shifts;
    const Ints numbers = (Ints)(words & ((1u << kBits) - 1));
    if constexpr (kUniform) {
      *out = scale * __builtin_convertvector(numbers, Floats) + offset;
      return;
    }
#if defined(__AVX2__)
    *out = (Floats)_mm256_permutevar8x32_ps((__m256)low, (__m256i)words);
    if constexpr (kBits == 4) {
      const __m256 upper = _mm256_permutevar8x32_ps((__m256)high, (__m256i)words);
      *out = (Floats)_mm256_blendv_ps((__m256)*out, upper, (__m256)(words << 28));
    }
#else
    for (int j = 0; j < W; ++j) (*out)[j] = scale * levels->at[numbers[j]] + offset;
#endif
  }
};

template <bool kUniform>
struct RowDecoder<8, 8, kUniform> {
  typedef Lanes<8>::Floats Floats;
  typedef Lanes<8>::Ints Ints;

  float scale, offset;

  inline __attribute__((always_inline)) void Start(const PackedLevels&) {}
  inline __attribute__((always_inline)) void Read(const uint8_t* codes, Floats* out) const {
#if defined(__AVX2__)
    const Ints numbers = (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
#else
    Ints numbers;
    for (int j = 0; j < 8; ++j) numbers[j] = codes[j];
#endif
    *out = scale * __builtin_convertvector(numbers, Floats) + offset;
  }
};

#if defined(__AVX512F__)
// All lanes: the intrinsics without a mask begin with an undefined vector, of which GCC 12 warns.
constexpr __mmask16 kAllLanes = 0xffff;

template <bool kUniform>
struct RowDecoder<8, 16, kUniform> {
  typedef Lanes<16>::Floats Floats;

  float scale, offset;

  inline __attribute__((always_inline)) void Start(const PackedLevels&) {}
  inline __attribute__((always_inline)) void Read(const uint8_t* codes, Floats* out) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const auto numbers = (Lanes<16>::Ints)_mm512_maskz_cvtepu8_epi32(kAllLanes, bytes);
    *out = scale * __builtin_convertvector(numbers, Floats) + offset;
  }
};

// It keeps what the numbers of a row stand for in a register that they select from.
template <int kBits, bool kUniform>
struct RowDecoder<kBits, 16, kUniform> {
  typedef Lanes<16>::Floats Floats;
  typedef Lanes<16>::Words Words;

  float scale, offset;
  Floats levels;

  inline __attribute__((always_inline)) void Start(const PackedLevels& of_table) {
    // A selection looks at four bits, of which some may belong to the next number.
    levels = scale * *reinterpret_cast<const Floats*>(of_table.at) + offset;
  }
  inline __attribute__((always_inline)) void Read(const uint8_t* codes, Floats* out) const {
    // Numbers of two bits are all in one word, others half in one and half in the next.
    constexpr uint32_t b = kBits, i = b == 2 ? 0 : 32 - 8 * b, j = b == 2 ? 16 : i;
    const Words shifts = {i, i + b, i + 2 * b, i + 3 * b, i + 4 * b, i + 5 * b, i + 6 * b, i + 7 * b,
                          j, j + b, j + 2 * b, j + 3 * b, j + 4 * b, j + 5 * b, j + 6 * b, j + 7 * b};
    Words words;
    if constexpr (kBits == 2) {
      words = Words{} + WordThatEnds<4>(codes);
    } else {
      __m128i both;
      if constexpr (kBits == 4)
        both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
      else
        both = _mm_insert_epi32(_mm_cvtsi32_si128(static_cast<int>(WordThatEnds<kBits>(codes))),
                                static_cast<int>(WordThatEnds<kBits>(codes + kBits)), 1);
      const Words halves = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
      words = (Words)_mm512_maskz_permutexvar_epi32(kAllLanes, (__m512i)halves, _mm512_castsi128_si512(both));
    }
    *out = (Floats)_mm512_maskz_permutexvar_ps(kAllLanes, (__m512i)(words >> shifts), (__m512)levels);
  }
};
#endif

static inline __attribute__((always_inline)) void PrefetchPacked(const uint8_t* row, int64_t bytes) {
  // Rows begin anywhere in a cache line.
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
  __builtin_prefetch(row + bytes - 1);
}

// Rows of one bag, of which the positions up to `known` may be prefetched.
struct PackedBag {
  const PackedLevels& levels;
  const uint8_t* rows;
  const int64_t* at;
  const float* weight;
  int64_t count, known, row_bytes;
};

// Adds columns [first, first + kVectors * W) of a bag to `out`, after what is there if `add`.
template <int kBits, int W, bool kUniform, int kVectors>
static inline __attribute__((always_inline)) void SumPackedTileOf(const PackedBag& bag, int64_t first, bool add,
                                                                  float* out) {
  typedef typename Lanes<W>::Floats Floats;
  constexpr int64_t kAhead = 16;
  const int64_t fetched = first == 0 ? bag.known : 0;
  Floats sum[kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) sum[j] = add ? *reinterpret_cast<const Floats*>(out + j * W) : Floats{};
  for (int64_t k = 0; k < bag.count; ++k) {
    if (k + kAhead < fetched) PrefetchPacked(bag.rows + bag.at[k + kAhead], bag.row_bytes);
    const uint8_t* const row = bag.rows + bag.at[k];
    const uint8_t* const codes = row + kPackedHeader + first * kBits / 8;
    RowDecoder<kBits, W, kUniform> decoder;
    ReadHeader(row, &decoder.scale, &decoder.offset);
    decoder.Start(bag.levels);
    const float weight = bag.weight ? bag.weight[k] : 1.0f;
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      Floats value;
      decoder.Read(codes + j * (W * kBits / 8), &value);
      sum[j] += weight * value;
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) *reinterpret_cast<Floats*>(out + j * W) = sum[j];
}

template <int kBits, int W, int kVectors>
static inline __attribute__((always_inline)) void SumPackedTile(const PackedBag& bag, int64_t first, bool add,
                                                                float* out) {
  if constexpr (W == 8 && kBits < 8 && !kSelectsFast<kBits>) {
    if (bag.levels.uniform) return SumPackedTileOf<kBits, W, true, kVectors>(bag, first, add, out);
  }
  SumPackedTileOf<kBits, W, false, kVectors>(bag, first, add, out);
}

// The last columns, fewer than eight.
template <int kBits>
static void SumPackedColumns(const PackedBag& bag, int64_t first, int64_t dim, bool add, float* out) {
  for (int64_t i = first; i < dim; ++i) {
    float sum = add ? out[i - first] : 0.0f;
    for (int64_t k = 0; k < bag.count; ++k) {
      const uint8_t* const row = bag.rows + bag.at[k];
      const uint32_t code = PackedCode(row + kPackedHeader, i, kBits);
      const float level = kBits == 8 ? static_cast<float>(code) : bag.levels.at[code % 16];
      float scale, offset;
      ReadHeader(row, &scale, &offset);
      sum += (bag.weight ? bag.weight[k] : 1.0f) * (scale * level + offset);
    }
    out[i - first] = sum;
  }
}

// tile(bag, add, out) for every bag.
template <typename Tile>
static inline __attribute__((always_inline)) void ForPackedBags(PackedBag bag, const int32_t* end, int64_t bags,
                                                                bool add, float* out, const int64_t* out_at,
                                                                Tile tile) {
  const int64_t last = end[bags - 1];
  const int64_t* const at = bag.at;
  const float* const weight = bag.weight;
  for (int64_t k = 0; k < last && k < 16; ++k) PrefetchPacked(bag.rows + at[k], bag.row_bytes);
  for (int64_t b = 0, begin = 0; b < bags; begin = end[b++]) {
    bag.at = at + begin;
    bag.weight = weight ? weight + begin : nullptr;
    bag.count = end[b] - begin;
    bag.known = last - begin;
    tile(bag, add && b == 0, out + out_at[b]);
  }
}

// Rows of kVectors vectors, whose sums stay in registers.  A function of its own: in one with others, they do not.
template <int kBits, int kVectors>
static __attribute__((noinline)) void SumPackedVectors(PackedBag bag, const int32_t* end, int64_t bags, bool add,
                                                       float* out, const int64_t* out_at) {
  bag.row_bytes = PackedRowBytes(kVectors * kPackedLanes, kBits);  // known to the compiler
  ForPackedBags(bag, end, bags, add, out, out_at, [](const PackedBag& own, bool onto, float* to) {
    SumPackedTile<kBits, kPackedLanes, kVectors>(own, 0, onto, to);
  });
}

// Calls SumPackedVectors if rows are whole vectors, and at most kVectors.
template <int kBits, int kVectors>
static bool SumWholePacked(int64_t dim, const PackedBag& bag, const int32_t* end, int64_t bags, bool add, float* out,
                           const int64_t* out_at) {
  if (dim == kVectors * kPackedLanes) {
    SumPackedVectors<kBits, kVectors>(bag, end, bags, add, out, out_at);
    return true;
  }
  if constexpr (kVectors > 1) return SumWholePacked<kBits, kVectors - 1>(dim, bag, end, bags, add, out, out_at);
  return false;
}

template <int kBits>
static void SumPacked(int64_t dim, const PackedLevels& levels, const uint8_t* rows, const int64_t* at,
                      const float* weight, const int32_t* end, int64_t bags, bool add, float* out,
                      const int64_t* out_at) {
  if (bags == 0 || dim == 0) return;
  const PackedBag all = {levels, rows, at, weight, 0, 0, PackedRowBytes(dim, kBits)};
  if (SumWholePacked<kBits, 8>(dim, all, end, bags, add, out, out_at)) return;
  ForPackedBags(all, end, bags, add, out, out_at, [dim](const PackedBag& bag, bool onto, float* to) {
    constexpr int W = kPackedLanes;
    int64_t i = 0;
    for (; i + 4 * W <= dim; i += 4 * W) SumPackedTile<kBits, W, 4>(bag, i, onto, to + i);
    for (; i + W <= dim; i += W) SumPackedTile<kBits, W, 1>(bag, i, onto, to + i);
    for (; i + 8 <= dim; i += 8) SumPackedTile<kBits, 8, 1>(bag, i, onto, to + i);
    SumPackedColumns<kBits>(bag, i, dim, onto, to + i);
  });
}

}  // namespace jax_tt
