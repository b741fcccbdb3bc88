// Sums of the rows of coded tables, for the instruction set that it is compiled for.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#ifndef JAX_TT_CPU_KERNELS_SUM_CODED_H_
#define JAX_TT_CPU_KERNELS_SUM_CODED_H_

#include <stdint.h>

#include "ffi/core/coded_rows.h"

namespace jax_tt {

// The rows of one bag.
struct CodedBag {
  const Codebooks& books;
  const uint8_t* codes;
  const int64_t* at;
  const float* weight;
  int64_t count;
};

// Adds columns [column, column + kVectors * W) of the codebook rows that codes [first, last) of the rows select.
template <int W, int kVectors, bool kBytes>
static inline __attribute__((always_inline)) void SumCodedTile(const CodedBag& bag, int64_t first, int64_t last,
                                                               int64_t column, bool add, float* out) {
  typedef float Floats __attribute__((vector_size(4 * W), aligned(4), may_alias));
  const Codebooks& books = bag.books;
  Floats sum[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) sum[j] = add ? *reinterpret_cast<const Floats*>(out + j * W) : Floats{};
  for (int64_t k = 0; k < bag.count; ++k) {
    const uint8_t* const row = bag.codes + bag.at[k];
    const float weight = bag.weight ? bag.weight[k] : 1.0f;
    for (int64_t i = first; i < last; ++i) {
      const uint32_t code = kBytes ? row[i] : CodeAt(row, i, books.bits);
      const float* const entry = books.rows + ((i << books.bits) + code) * books.width + column;
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[j] += weight * *reinterpret_cast<const Floats*>(entry + j * W);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) *reinterpret_cast<Floats*>(out + j * W) = sum[j];
}

// All columns of codes [first, last).
template <bool kBytes>
static inline __attribute__((always_inline)) void SumCodes(const CodedBag& bag, int64_t first, int64_t last, bool add,
                                                           float* out) {
  const int64_t width = bag.books.width;
  int64_t i = 0;
  for (; i + 64 <= width; i += 64) SumCodedTile<16, 4, kBytes>(bag, first, last, i, add, out + i);
  for (; i + 16 <= width; i += 16) SumCodedTile<16, 1, kBytes>(bag, first, last, i, add, out + i);
  for (; i + 4 <= width; i += 4) SumCodedTile<4, 1, kBytes>(bag, first, last, i, add, out + i);
  for (; i < width; ++i) SumCodedTile<1, 1, kBytes>(bag, first, last, i, add, out + i);
}

static inline void PrefetchCodes(const uint8_t* row, int64_t bytes) {
  // Rows begin anywhere in a cache line.
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
  __builtin_prefetch(row + bytes - 1);
}

template <bool kBytes>
static void SumCodedBagsOf(const Codebooks& books, const uint8_t* codes, const int64_t* at, const float* weight,
                           const int32_t* end, int64_t bags, bool add, float* out, const int64_t* out_at) {
  constexpr int64_t kAhead = 32;
  const int64_t bytes = books.row_bytes(), last = bags > 0 ? end[bags - 1] : 0;
  int64_t fetched = 0;
  for (int64_t b = 0, begin = 0; b < bags; begin = end[b++]) {
    for (; fetched < last && fetched < end[b] + kAhead; ++fetched) PrefetchCodes(codes + at[fetched], bytes);
    const CodedBag bag = {books, codes, at + begin, weight ? weight + begin : nullptr, end[b] - begin};
    float* const to = out + out_at[b];
    const bool onto = add && b == 0;
    if (books.product) {
      for (int64_t i = 0; i < books.num_codes; ++i) SumCodes<kBytes>(bag, i, i + 1, onto, to + i * books.width);
    } else {
      SumCodes<kBytes>(bag, 0, books.num_codes, onto, to);
    }
  }
}

static void SumCoded(const Codebooks& books, const uint8_t* codes, const int64_t* at, const float* weight,
                     const int32_t* end, int64_t bags, bool add, float* out, const int64_t* out_at) {
  if (books.bits == 8)
    SumCodedBagsOf<true>(books, codes, at, weight, end, bags, add, out, out_at);
  else
    SumCodedBagsOf<false>(books, codes, at, weight, end, bags, add, out, out_at);
}

}  // namespace jax_tt

#endif  // JAX_TT_CPU_KERNELS_SUM_CODED_H_
