// Sums of the rows of coded tables, for the instruction set that it is compiled for.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#ifndef JAX_TT_CPU_KERNELS_SUM_CODED_H_
#define JAX_TT_CPU_KERNELS_SUM_CODED_H_

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

// The codes of a row, times `width`, at every kCodedRows-th place of `codes`.
static inline __attribute__((always_inline)) void UnpackCodes(const uint8_t* row, int64_t bytes, int64_t bits,
                                                              int64_t count, int64_t width, uint32_t* codes) {
  const uint32_t mask = (1u << bits) - 1;
  const int64_t last = bytes - 8;
  uint64_t word = last < 0 ? ShortRow(row, bytes) : 0;
  const uint64_t whole = word;
  // Four codes begin at a multiple of four bits, and end within 64 bits from the byte where they begin.  A word that
  // would reach beyond the row begins earlier.
  for (int64_t i = 0; i < count; i += 4) {
    int64_t byte = 0;
    if (last < 0) {
      word = whole;
    } else {
      byte = i * bits / 8 < last ? i * bits / 8 : last;
      memcpy(&word, row + byte, sizeof(word));
    }
    word >>= i * bits - 8 * byte;
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j)
      codes[(i + j) * kCodedRows] = (static_cast<uint32_t>(word >> (j * bits)) & mask) * static_cast<uint32_t>(width);
  }
}

// Rows whose codes are unpacked.
struct UnpackedRows {
  uint32_t* codes;  // [codes, kCodedRows]
  float scale[kCodedRows];
  int64_t count;
};

// Adds columns [0, kVectors * W) of the codebook rows at `entries` that codes [first, first + terms) of the rows
// select.
template <int W, int kVectors>
static inline __attribute__((always_inline)) void AddCodedTile(const UnpackedRows& rows, int64_t first, int64_t terms,
                                                               const float* entries, int64_t of_codebook, float* out) {
  typedef float Floats __attribute__((vector_size(4 * W), aligned(4), may_alias));
  Floats sum[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) sum[j] = *reinterpret_cast<const Floats*>(out + j * W);
  for (int64_t t = 0; t < terms; ++t, entries += of_codebook) {
    const uint32_t* const codes = rows.codes + (first + t) * kCodedRows;
    for (int64_t k = 0; k < rows.count; ++k) {
      const float* const entry = entries + codes[k];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[j] += rows.scale[k] * *reinterpret_cast<const Floats*>(entry + j * W);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) *reinterpret_cast<Floats*>(out + j * W) = sum[j];
}

// Adds what `terms` codes of every part select from the codebooks of the part after its first `skipped` ones.
static void AddCodedRows(const Codebooks& books, const UnpackedRows& rows, int64_t terms, int64_t skipped, float* out) {
  if (rows.count == 0) return;
  const int64_t width = books.width, of_codebook = width << books.bits;
  const float* entries = books.rows + skipped * of_codebook;
  for (int64_t p = 0; p < books.parts; ++p, entries += (books.terms + books.hot_terms) * of_codebook, out += width) {
    const int64_t first = p * terms;
    int64_t i = 0;
    for (; i + 64 <= width; i += 64) AddCodedTile<16, 4>(rows, first, terms, entries + i, of_codebook, out + i);
    for (; i + 16 <= width; i += 16) AddCodedTile<16, 1>(rows, first, terms, entries + i, of_codebook, out + i);
    for (; i + 8 <= width; i += 8) AddCodedTile<8, 1>(rows, first, terms, entries + i, of_codebook, out + i);
    for (; i + 4 <= width; i += 4) AddCodedTile<4, 1>(rows, first, terms, entries + i, of_codebook, out + i);
    for (; i + 2 <= width; i += 2) AddCodedTile<2, 1>(rows, first, terms, entries + i, of_codebook, out + i);
    for (; i < width; ++i) AddCodedTile<1, 1>(rows, first, terms, entries + i, of_codebook, out + i);
  }
}

static inline void PrefetchCodes(const uint8_t* row, int64_t bytes) {
  // Rows begin anywhere in a cache line.
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
  __builtin_prefetch(row + bytes - 1);
}

static void SumCoded(const Codebooks& books, const uint8_t* codes, const int64_t* at, const float* weight,
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
  UnpackedRows rows{unpacked, {}, 0}, hot{unpacked + Codebooks::Unpacked(books.parts * books.terms), {}, 0};
  const auto unpack = [&](const uint8_t* row, int64_t row_bytes, int64_t terms, float scale, UnpackedRows* to) {
    UnpackCodes(row, row_bytes, books.bits, books.parts * terms, books.width, to->codes + to->count);
    to->scale[to->count++] = scale;
  };
  for (int64_t k = 0; k < num_rows && k < kAhead; ++k) fetch(k);
  for (int64_t b = 0, k = 0; b < bags; ++b) {
    float* const to = out + out_at[b];
    if (!add || b > 0) memset(to, 0, static_cast<size_t>(books.dim()) * sizeof(float));
    while (k < end[b]) {
      rows.count = hot.count = 0;
      for (; k < end[b] && rows.count < kCodedRows; ++k) {
        const float scale = weight ? weight[k] : 1.0f;
        unpack(codes + at[k] * bytes, bytes, books.terms, scale, &rows);
        if (hot_bytes > 0 && place[k % kAhead] >= 0)
          unpack(books.hot_codes + place[k % kAhead] * hot_bytes, hot_bytes, books.hot_terms, scale, &hot);
        if (k + kAhead < num_rows) fetch(k + kAhead);
      }
      AddCodedRows(books, rows, books.terms, 0, to);
      AddCodedRows(books, hot, books.hot_terms, books.terms, to);
    }
  }
}

}  // namespace jax_tt

#endif  // JAX_TT_CPU_KERNELS_SUM_CODED_H_
