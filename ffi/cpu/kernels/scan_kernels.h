// Kernels that score rows of a table for queries and offer them, chosen at run time as those of kernels.h are.
#pragma once

#include <math.h>
#include <stdint.h>

#include "ffi/core/half.h"
#include "ffi/core/packed_rows.h"

namespace jax_tt {

// The best rows that one thread knows for one query.  Keys order rows as their scores do, and equal scores by id.
struct Candidates {
  uint64_t* keys;           // [capacity], of which `count` are set
  const int32_t* excluded;  // [num_excluded], ascending
  int64_t count, num_excluded;
  uint64_t least;  // a row whose key is not above it is none of the best
};

// Candidates of all queries.  `threshold` says the same as the least keys, in scores alone: rows are offered if their
// score is above it.
struct BestRows {
  Candidates* of_query;  // [queries]
  float* threshold;      // [queries, up to a whole number of vectors]
  const bool* present;   // [num_rows], or null: all rows
  int64_t num_rows, k, capacity;
  // Whether a query gets its rows in the order of their ids, so that a row with the score of the last one is no better.
  bool in_order;
  // Drops all but the best k of a query's candidates.
  void (*shrink)(const BestRows& best, int64_t query);
};

// Greater for a greater score, and among equal scores for a smaller id.  -0 is 0; the score is no NaN.
JAX_TT_INLINE uint64_t KeyOf(float score, int64_t id) {
  const uint32_t bits = FloatToBits(score + 0.0f);
  const uint32_t ordered = bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(id);
}
JAX_TT_INLINE int32_t IdOf(uint64_t key) { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }
JAX_TT_INLINE float ScoreOf(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return BitsToFloat(ordered ^ ((ordered >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

JAX_TT_INLINE bool IsExcluded(const Candidates& of, int64_t id) {
  int64_t low = 0, high = of.num_excluded;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (of.excluded[middle] < id)
      low = middle + 1;
    else
      high = middle;
  }
  return low < of.num_excluded && of.excluded[low] == id;
}

// Takes a row whose score is above the threshold.
JAX_TT_INLINE void Offer(const BestRows& best, int64_t query, int64_t id, float score) {
  Candidates& of = best.of_query[query];
  const uint64_t key = KeyOf(score, id);
  if (key <= of.least || id >= best.num_rows || (best.present && !best.present[id]) || IsExcluded(of, id)) return;
  of.keys[of.count++] = key;
  if (of.count == best.capacity) best.shrink(best, query);
}

// Rows, and the columns that they are multiplied by.
struct ScanBlock {
  const float* rows;  // [num_rows, depth]
  int64_t num_rows, depth;
  const float* columns;  // [depth, stride], where a stride is a whole number of vectors
  int64_t num_columns, stride;
  // Row i is the row first_id + i + j * id_step of the table for column j, which is of query + j * query_step: a query
  // for each column, or the same for all.
  int64_t first_id, id_step, query, query_step;
};

// Quantized rows, in the place of the rows of a ScanBlock.
struct ScanPacked {
  const uint8_t* rows;  // [num_rows, row_bytes]
  int64_t row_bytes;
  const PackedLevels* levels;
};
using ScanPackedKernel = void (*)(const ScanPacked& packed, const ScanBlock& block, const BestRows& best);

// Rows of codes, whose scores are sums of what their codes select from the partial scores of a query.
struct ScanCodes {
  const uint8_t* rows;  // [num_rows, row_bytes]
  int64_t num_rows, row_bytes, num_codes;
  int64_t first_id;
  int64_t num_queries;
  const float* partial;  // [num_queries, num_codes << bits]
  // For codes of four bits.  A score is at most base + unit * the sum of the bounds that the codes select, but for
  // `error`, by which sums of floats may be off.  Rows whose sum of bounds is below the limit of a query are none of
  // its best; `limit` is changed with the threshold.
  const uint8_t* bounds;           // [num_queries, num_codes, 16], at most kMostBound each
  const struct ScoreBound* bound;  // [num_queries]
  int32_t* limit;                  // [num_queries]
};

struct ScoreBound {
  double base, unit, error;
};

// Two bounds fit a byte, and the sum of the bounds of kMostBoundedCodes 16 bits.
constexpr int kMostBound = 127;
constexpr int64_t kMostBoundedCodes = 256;

// The least sum of bounds of a row whose score is above the threshold.
JAX_TT_INLINE int32_t LimitOf(const ScoreBound& bound, float threshold) {
  const double sum = (threshold - bound.error - bound.base) / bound.unit;
  // Also where the sum is NaN, as it is for bounds that are not finite: they exclude no row.
  if (!(sum >= 0)) return 0;
  return sum < 65534 ? static_cast<int32_t>(sum) + 1 : 65535;
}

struct ScanKernels {
  // Offers the products of all rows and columns.
  void (*products)(const ScanBlock& block, const BestRows& best);
  // The same for few queries [num_columns, depth] in the place of columns, where vectors divide the depth.
  void (*dots)(const ScanBlock& block, const BestRows& best);
  // The same for quantized rows, where packed_lanes divides the depth.
  ScanPackedKernel dots8, dots4, dots3, dots2;
  // Offers rows of codes of eight bits, or of four, with their scores.
  void (*bytes)(const ScanCodes& codes, const BestRows& best);
  void (*half_bytes)(const ScanCodes& codes, const BestRows& best);
  // Numbers of 16 bits as floats.
  void (*widen_bfloat16)(int64_t n, const bfloat16* from, float* to);
  void (*widen_float16)(int64_t n, const float16* from, float* to);
  int64_t lanes, packed_lanes;  // of a vector

  ScanPackedKernel packed_dots(int bits) const {
    return bits == 8 ? dots8 : bits == 4 ? dots4 : bits == 3 ? dots3 : dots2;
  }
};

constexpr int64_t kMostScanLanes = 16;

const ScanKernels& GetScanKernels();

#define JAX_TT_DECLARE_KERNELS(isa) \
  namespace isa {                   \
  extern const ScanKernels kScan;   \
  }
JAX_TT_DECLARE_KERNELS(baseline)
JAX_TT_DECLARE_KERNELS(x86_64_v3)
JAX_TT_DECLARE_KERNELS(x86_64_v4)
#undef JAX_TT_DECLARE_KERNELS

}  // namespace jax_tt
