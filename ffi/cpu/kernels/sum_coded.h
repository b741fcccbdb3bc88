// Sums of the rows of coded tables, for the instruction set that it is compiled for.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#pragma once

#include <stdint.h>
#include <string.h>

#include "ffi/core/coded_rows.h"
#include "ffi/cpu/kernels/coded_kernels.h"

namespace jax_tt {

// A row of codes in a word, if it has fewer bytes than one.
static inline __attribute__((always_inline)) uint64_t ShortRow(const uint8_t* row, int64_t bytes) {
  uint64_t word = 0;
  for (int64_t i = 0; i < bytes; ++i) word |= static_cast<uint64_t>(row[i]) << (8 * i);
  return word;
}

// The codes of a row, times `width`; up to three places of `codes` beyond the last are written as well.
static inline __attribute__((always_inline)) void UnpackCodes(const uint8_t* row, int64_t bytes, int64_t bits,
                                                              int64_t count, int64_t width, uint32_t* codes) {
  typedef uint64_t Words __attribute__((vector_size(32)));
  typedef uint32_t Four __attribute__((vector_size(16), aligned(4), may_alias));
  typedef uint8_t Bytes __attribute__((vector_size(8), aligned(1), may_alias));
  typedef uint32_t Eight __attribute__((vector_size(32), aligned(4), may_alias));
  const uint32_t factor = static_cast<uint32_t>(width);
  int64_t i = 0;
  if (bits == 8) {
    for (; i + 8 <= count; i += 8)
      *reinterpret_cast<Eight*>(codes + i) =
          __builtin_convertvector(*reinterpret_cast<const Bytes*>(row + i), Eight) * factor;
  }
  const uint64_t size = static_cast<uint64_t>(bits), mask = (uint64_t{1} << bits) - 1;
  const Words shifts = {0, size, 2 * size, 3 * size};
  const int64_t last = bytes - 8;
  uint64_t word = last < 0 ? ShortRow(row, bytes) : 0;
  const uint64_t whole = word;
  // Four codes begin at a multiple of four bits, and end within 64 bits from the byte where they begin.  A word that
  // would reach beyond the row begins earlier.
  for (; i < count; i += 4) {
    int64_t byte = 0;
    if (last < 0) {
      word = whole;
    } else {
      byte = i * bits / 8 < last ? i * bits / 8 : last;
      memcpy(&word, row + byte, sizeof(word));
    }
    word >>= i * bits - 8 * byte;
    const Words four = (Words{word, word, word, word} >> shifts) & mask;
    *reinterpret_cast<Four*>(codes + i) = __builtin_convertvector(four, Four) * factor;
  }
}

// Rows whose codes are unpacked.
struct UnpackedRows {
  uint32_t* codes;  // [kCodedRows, stride]
  int64_t stride;
  float scale[kCodedRows];
  int64_t count;
};

// Adds columns [0, kVectors * W) of the codebook rows at `entries` that codes [first, first + terms) of the rows
// select.
template <int W, int kVectors, bool kScaled>
static inline __attribute__((always_inline)) void AddCodedTile(const UnpackedRows& rows, int64_t first, int64_t terms,
                                                               const float* entries, int64_t of_codebook, float* out) {
  typedef float Floats __attribute__((vector_size(4 * W), aligned(4), may_alias));
  // Few vectors do not fill the time that an addition takes: rows alternate between two sums.
  constexpr int kSums = kVectors == 1 ? 2 : 1;
  Floats sum[kSums][kVectors] = {};
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) sum[0][j] = *reinterpret_cast<const Floats*>(out + j * W);
  for (int64_t t = 0; t < terms; ++t, entries += of_codebook) {
    const uint32_t* code = rows.codes + first + t;
    int64_t k = 0;
    const auto add = [&](Floats* to) {
      const float* const entry = entries + *code;
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const Floats own = *reinterpret_cast<const Floats*>(entry + j * W);
        to[j] += kScaled ? rows.scale[k] * own : own;
      }
      code += rows.stride;
      ++k;
    };
    while (k + kSums <= rows.count) {
#pragma GCC unroll 2
      for (int s = 0; s < kSums; ++s) add(sum[s]);
    }
    if (k < rows.count) add(sum[0]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j)
    *reinterpret_cast<Floats*>(out + j * W) = kSums == 1 ? sum[0][j] : sum[0][j] + sum[kSums - 1][j];
}

// Adds what `terms` codes of every part select from the codebooks of the part after its first `skipped` ones.
template <bool kScaled>
static void AddCodedRows(const Codebooks& books, const UnpackedRows& rows, int64_t terms, int64_t skipped, float* out) {
  if (rows.count == 0) return;
  const int64_t width = books.width, of_codebook = width << books.bits;
  const float* entries = books.rows + skipped * of_codebook;
  for (int64_t p = 0; p < books.parts; ++p, entries += (books.terms + books.hot_terms) * of_codebook, out += width) {
    int64_t i = 0;
    const auto add = [&]<int W, int kVectors>() {
      for (; i + W * kVectors <= width; i += W * kVectors)
        AddCodedTile<W, kVectors, kScaled>(rows, p * terms, terms, entries + i, of_codebook, out + i);
    };
    add.template operator()<16, 4>();
    add.template operator()<16, 1>();
    add.template operator()<8, 1>();
    add.template operator()<4, 1>();
    add.template operator()<2, 1>();
    add.template operator()<1, 1>();
  }
}

static inline void PrefetchCodes(const uint8_t* row, int64_t bytes) {
  // Rows begin anywhere in a cache line.
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
  __builtin_prefetch(row + bytes - 1);
}

template <bool kScaled>
static void SumCodedBagsOf(const Codebooks& books, const uint8_t* codes, const int64_t* at, const float* weight,
                           const int32_t* end, int64_t bags, bool add, float* out, const int64_t* out_at,
                           uint32_t* unpacked) {
  constexpr int64_t kAhead = 32;
  const int64_t bytes = books.row_bytes(), hot_bytes = books.hot_bytes();
  const int64_t num_rows = bags > 0 ? end[bags - 1] : 0;
  int64_t place[kAhead];  // of the hot codes of the next rows
  const auto fetch = [&](int64_t k) {
    PrefetchCodes(codes + at[k] * bytes, bytes);
    if (hot_bytes == 0) return;
    place[k % kAhead] = HotPlace(books, at[k]);
    if (place[k % kAhead] >= 0) PrefetchCodes(books.hot_codes + place[k % kAhead] * hot_bytes, hot_bytes);
  };
  const int64_t stride = Codebooks::Unpacked(books.parts * books.terms);
  UnpackedRows rows{unpacked, stride, {}, 0};
  UnpackedRows hot{unpacked + stride * kCodedRows, Codebooks::Unpacked(books.parts * books.hot_terms), {}, 0};
  const auto unpack = [&](const uint8_t* row, int64_t row_bytes, int64_t terms, float scale, UnpackedRows* to) {
    UnpackCodes(row, row_bytes, books.bits, books.parts * terms, books.width, to->codes + to->count * to->stride);
    to->scale[to->count++] = scale;
  };
  for (int64_t k = 0; k < num_rows && k < kAhead; ++k) fetch(k);
  for (int64_t b = 0, k = 0; b < bags; ++b) {
    float* const to = out + out_at[b];
    if (!add || b > 0) memset(to, 0, static_cast<size_t>(books.dim()) * sizeof(float));
    while (k < end[b]) {
      rows.count = hot.count = 0;
      for (; k < end[b] && rows.count < kCodedRows; ++k) {
        const float scale = kScaled ? weight[k] : 1.0f;
        unpack(codes + at[k] * bytes, bytes, books.terms, scale, &rows);
        if (hot_bytes > 0 && place[k % kAhead] >= 0)
          unpack(books.hot_codes + place[k % kAhead] * hot_bytes, hot_bytes, books.hot_terms, scale, &hot);
        if (k + kAhead < num_rows) fetch(k + kAhead);
      }
      AddCodedRows<kScaled>(books, rows, books.terms, 0, to);
      AddCodedRows<kScaled>(books, hot, books.hot_terms, books.terms, to);
    }
  }
}

static void SumCoded(const Codebooks& books, const uint8_t* codes, const int64_t* at, const float* weight,
                     const int32_t* end, int64_t bags, bool add, float* out, const int64_t* out_at,
                     uint32_t* unpacked) {
  if (weight)
    SumCodedBagsOf<true>(books, codes, at, weight, end, bags, add, out, out_at, unpacked);
  else
    SumCodedBagsOf<false>(books, codes, at, weight, end, bags, add, out, out_at, unpacked);
}

}  // namespace jax_tt
