// Scores of rows as products of matrices that are never stored: each tile is compared with the thresholds of its
// queries while it is in registers.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#pragma once

#include <stdint.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "ffi/cpu/kernels/scan_kernels.h"
#include "ffi/cpu/kernels/sum_lanes.h"

namespace jax_tt {

#if defined(__AVX512F__)
constexpr int kScanLanes = 16;
#elif defined(__AVX__)
constexpr int kScanLanes = 8;
#else
constexpr int kScanLanes = 4;
#endif
typedef float ScanFloats __attribute__((vector_size(4 * kScanLanes), aligned(4), may_alias));

// Which lanes of `scores` are above those of `threshold`, a bit each.
static inline __attribute__((always_inline)) uint32_t LanesAbove(const ScanFloats& scores,
                                                                 const ScanFloats& threshold) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)scores, (__m512)threshold, _CMP_GT_OQ);
#elif defined(__AVX__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)scores, (__m256)threshold, _CMP_GT_OQ)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpgt_ps((__m128)scores, (__m128)threshold)));
#else
  uint32_t above = 0;
  for (int l = 0; l < kScanLanes; ++l) above |= static_cast<uint32_t>(scores[l] > threshold[l]) << l;
  return above;
#endif
}

// Offers what is above its threshold among the scores [rows, vectors * kScanLanes] of rows and columns from these on.
static __attribute__((noinline)) void OfferTile(const ScanBlock& block, const BestRows& best, const float* scores,
                                                int64_t rows, int64_t vectors, int64_t row, int64_t column) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < vectors; ++j, scores += kScanLanes) {
      const int64_t first = column + j * kScanLanes;
      const float* const threshold = best.threshold + block.query + first * block.query_step;
      ScanFloats limit;
      if (block.query_step)
        limit = *reinterpret_cast<const ScanFloats*>(threshold);
      else
        limit = ScanFloats{} + *threshold;
      for (uint32_t above = LanesAbove(*reinterpret_cast<const ScanFloats*>(scores), limit); above != 0;
           above &= above - 1) {
        const int64_t lane = __builtin_ctz(above), at = first + lane;
        if (at < block.num_columns && scores[lane] > threshold[lane * block.query_step])
          Offer(best, block.query + at * block.query_step, block.first_id + row + i + at * block.id_step, scores[lane]);
      }
    }
}

// kRows rows from `row` on with kVectors vectors of columns from `column` on.
template <int kRows, int kVectors>
static inline __attribute__((always_inline)) void ScanTile(const ScanBlock& block, const BestRows& best, int64_t row,
                                                           int64_t column) {
  const int64_t depth = block.depth, stride = block.stride;
  const float *a = block.rows + row * depth, *b = block.columns + column;
  ScanFloats sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[i][j] = ScanFloats{};
  for (int64_t t = 0; t < depth; ++t) {
    ScanFloats columns[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      columns[j] = *reinterpret_cast<const ScanFloats*>(b + t * stride + j * kScanLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] += a[i * depth + t] * columns[j];
  }
  const float* const threshold = best.threshold + block.query + column * block.query_step;
  uint32_t above = 0;
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    const ScanFloats limit =
        block.query_step ? *reinterpret_cast<const ScanFloats*>(threshold + j * kScanLanes) : ScanFloats{} + *threshold;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) above |= LanesAbove(sum[i][j], limit);
  }
  if (__builtin_expect(above == 0, 1)) return;
  float scores[kRows * kVectors * kScanLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      *reinterpret_cast<ScanFloats*>(scores + (i * kVectors + j) * kScanLanes) = sum[i][j];
  OfferTile(block, best, scores, kRows, kVectors, row, column);
}

// The last 1 to kRows rows.
template <int kRows, int kVectors>
static inline __attribute__((always_inline)) void ScanRowTail(const ScanBlock& block, const BestRows& best, int64_t row,
                                                              int64_t column) {
  if constexpr (kRows > 0) {
    if (block.num_rows - row == kRows)
      ScanTile<kRows, kVectors>(block, best, row, column);
    else
      ScanRowTail<kRows - 1, kVectors>(block, best, row, column);
  }
}

template <int kRows, int kVectors>
static __attribute__((noinline)) void ScanPanel(const ScanBlock& block, const BestRows& best, int64_t column) {
  int64_t row = 0;
  for (; row + kRows <= block.num_rows; row += kRows) ScanTile<kRows, kVectors>(block, best, row, column);
  ScanRowTail<kRows - 1, kVectors>(block, best, row, column);
}

static void ScanProducts(const ScanBlock& block, const BestRows& best) {
  constexpr int kWide = kScanLanes == 16 ? 4 : 2;
  int64_t column = 0;
  const auto left = [&] { return block.num_columns - column; };
  for (; left() > (kWide - 1) * kScanLanes; column += kWide * kScanLanes) ScanPanel<6, kWide>(block, best, column);
  if constexpr (kWide == 4) {
    if (left() > 2 * kScanLanes) {
      ScanPanel<7, 3>(block, best, column);
      return;
    }
    if (left() > kScanLanes) {
      ScanPanel<8, 2>(block, best, column);
      return;
    }
  }
  if (left() > 0) ScanPanel<8, 1>(block, best, column);
}

// The products of kScanLanes rows, of which `count` exist, with one query.  The others repeat the last one.
static inline __attribute__((always_inline)) void ScanDotTile(const ScanBlock& block, const BestRows& best, int64_t row,
                                                              int64_t count, int64_t column) {
  const int64_t depth = block.depth;
  const float *a = block.rows + row * depth, *b = block.columns + column * depth;
  ScanFloats sum[kScanLanes] = {};
  if (__builtin_expect(count == kScanLanes, 1)) {
    for (int64_t t = 0; t < depth; t += kScanLanes)
#pragma GCC unroll 16
      for (int l = 0; l < kScanLanes; ++l)
        sum[l] += *reinterpret_cast<const ScanFloats*>(a + l * depth + t) * *reinterpret_cast<const ScanFloats*>(b + t);
  } else {
    for (int64_t t = 0; t < depth; t += kScanLanes)
#pragma GCC unroll 16
      for (int l = 0; l < kScanLanes; ++l)
        sum[l] += *reinterpret_cast<const ScanFloats*>(a + (l < count ? l : count - 1) * depth + t) *
                  *reinterpret_cast<const ScanFloats*>(b + t);
  }
  SumLanes<kScanLanes, 4, kScanLanes>(sum);
  const int64_t query = block.query + column;
  uint32_t above = LanesAbove(sum[0], ScanFloats{} + best.threshold[query]) & ((1u << count) - 1);
  if (__builtin_expect(above == 0, 1)) return;
  float scores[kScanLanes];
  *reinterpret_cast<ScanFloats*>(scores) = sum[0];
  for (; above != 0; above &= above - 1) {
    const int64_t lane = __builtin_ctz(above);
    if (scores[lane] > best.threshold[query]) Offer(best, query, block.first_id + row + lane, scores[lane]);
  }
}

static void ScanDots(const ScanBlock& block, const BestRows& best) {
  int64_t row = 0;
  for (; row + kScanLanes <= block.num_rows; row += kScanLanes)
    for (int64_t column = 0; column < block.num_columns; ++column) ScanDotTile(block, best, row, kScanLanes, column);
  if (row < block.num_rows)
    for (int64_t column = 0; column < block.num_columns; ++column)
      ScanDotTile(block, best, row, block.num_rows - row, column);
}

}  // namespace jax_tt
