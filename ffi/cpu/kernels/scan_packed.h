// Products of quantized rows with few queries, decoded in registers.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#pragma once

#include <stdint.h>

#include "ffi/cpu/kernels/scan_kernels.h"
#include "ffi/cpu/kernels/scan_products.h"
#include "ffi/cpu/kernels/sum_lanes.h"
#include "ffi/cpu/kernels/sum_packed.h"

namespace jax_tt {

// The products of kPackedLanes rows, of which `count` exist, with the query of a column.  The others repeat the last
// one.
template <int kBits, bool kUniform>
static inline __attribute__((always_inline)) void ScanPackedTile(const ScanPacked& packed, const ScanBlock& block,
                                                                 const BestRows& best, int64_t row, int64_t count,
                                                                 int64_t column) {
  constexpr int W = kPackedLanes;
  typedef Lanes<W>::Floats Floats;
  const int64_t depth = block.depth;
  const float* const b = block.columns + column * depth;
  Floats sum[W];
  for (int l = 0; l < W; ++l) {
    const uint8_t* const from = packed.rows + (row + (l < count ? l : count - 1)) * packed.row_bytes;
    RowDecoder<kBits, W, kUniform> decoder;
    ReadHeader(from, &decoder.scale, &decoder.offset);
    decoder.Start(*packed.levels);
    Floats of_row = {};
    for (int64_t t = 0; t < depth; t += W) {
      Floats value;
      decoder.Read(from + kPackedHeader + t * kBits / 8, &value);
      of_row += value * *reinterpret_cast<const Floats*>(b + t);
    }
    sum[l] = of_row;
  }
  SumLanes<W, 4, W>(sum);
  float scores[W];
  *reinterpret_cast<Floats*>(scores) = sum[0];
  const int64_t query = block.query + column;
  const ScanFloats threshold = ScanFloats{} + best.threshold[query];
  uint32_t above = 0;
#pragma GCC unroll 2
  for (int l = 0; l < W; l += kScanLanes)
    above |= LanesAbove(*reinterpret_cast<const ScanFloats*>(scores + l), threshold) << l;
  above &= (1u << count) - 1;
  if (__builtin_expect(above == 0, 1)) return;
  for (; above != 0; above &= above - 1) {
    const int64_t lane = __builtin_ctz(above);
    if (scores[lane] > best.threshold[query]) Offer(best, query, block.first_id + row + lane, scores[lane]);
  }
}

template <int kBits, bool kUniform>
static __attribute__((noinline)) void ScanPackedRows(const ScanPacked& packed, const ScanBlock& block,
                                                     const BestRows& best) {
  for (int64_t row = 0; row < block.num_rows; row += kPackedLanes) {
    const int64_t left = block.num_rows - row, count = left < kPackedLanes ? left : kPackedLanes;
    for (int64_t column = 0; column < block.num_columns; ++column)
      ScanPackedTile<kBits, kUniform>(packed, block, best, row, count, column);
  }
}

template <int kBits>
static void ScanPackedDots(const ScanPacked& packed, const ScanBlock& block, const BestRows& best) {
  if constexpr (kPackedLanes == 8 && kBits < 8 && !kSelectsFast<kBits>) {
    if (packed.levels->uniform) return ScanPackedRows<kBits, true>(packed, block, best);
  }
  ScanPackedRows<kBits, false>(packed, block, best);
}

}  // namespace jax_tt
