// Beam search for the codes of rows, and sweeps that choose every code anew, given the others.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#pragma once

#include <stdint.h>

#include "ffi/cpu/kernels/scan_products.h"
#include "ffi/cpu/kernels/search_kernels.h"

namespace jax_tt {

// Rows of a codebook whose scores are computed before they are compared.
constexpr int64_t kSearchColumns = 256;

// The least scores and their places, ascending; of equal scores, the lower place comes first.
struct LeastScores {
  float scores[kSearchRows];
  int32_t at[kSearchRows];
  int64_t count;

  void Clear(int64_t wanted) {
    count = wanted;
    for (int k = 0; k < kSearchRows; ++k) {
      scores[k] = __builtin_inff();
      at[k] = 0;  // stays where no score is finite
    }
  }

  bool Takes(int64_t k, float score, int32_t place) const {
    return score < scores[k] || (score == scores[k] && place < at[k]);
  }

  void Offer(float score, int32_t place) {
    if (!Takes(count - 1, score, place)) return;
    int64_t k = count - 1;
    for (; k > 0 && Takes(k - 1, score, place); --k) {
      scores[k] = scores[k - 1];
      at[k] = at[k - 1];
    }
    scores[k] = score;
    at[k] = place;
  }
};

// Four vectors that are compared with the rows of a codebook.  Either each has a list of its own, or all share the
// first one, in which the places of vector i begin at i * size.
struct SearchStep {
  const float* scaled;       // [kSearchRows, width], the vectors times -2
  float error[kSearchRows];  // added to the scores
  int64_t vectors;           // the others repeat one of these
  LeastScores* least;
  bool shared;
};

// Scores of four vectors with some rows of a codebook, and the least of each lane.
struct SearchScores {
  float scores[kSearchRows][kSearchColumns];
  ScanFloats least[kSearchRows];
};

template <int kVectors>
static inline __attribute__((always_inline)) void SearchTile(const CodeSearch& search, const SearchStep& step,
                                                             int64_t term, int64_t first, int64_t column,
                                                             SearchScores* out) {
  const int64_t width = search.width, stride = search.stride;
  const float* columns[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    const int64_t at = first + column + j * kScanLanes, part = at / kSearchStride;
    columns[j] = search.columns + (term * stride + part * kSearchStride) * width + at % kSearchStride;
  }
  const float* const lengths = search.lengths + term * stride + first + column;
  ScanFloats sum[kSearchRows][kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    const ScanFloats length = *reinterpret_cast<const ScanFloats*>(lengths + j * kScanLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kSearchRows; ++i) sum[i][j] = length + step.error[i];
  }
  for (int64_t t = 0; t < width; ++t) {
    ScanFloats entries[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      entries[j] = *reinterpret_cast<const ScanFloats*>(columns[j] + t * kSearchStride);
#pragma GCC unroll 4
    for (int i = 0; i < kSearchRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] += step.scaled[i * width + t] * entries[j];
  }
#pragma GCC unroll 4
  for (int i = 0; i < kSearchRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      *reinterpret_cast<ScanFloats*>(&out->scores[i][column + j * kScanLanes]) = sum[i][j];
      out->least[i] = sum[i][j] < out->least[i] ? sum[i][j] : out->least[i];
    }
}

// A number that at least `count` scores of the lanes do not exceed: the least of all, or the greatest of four minima.
static inline float SearchBound(const ScanFloats& lanes, int64_t count) {
  float least[kScanLanes];
  *reinterpret_cast<ScanFloats*>(least) = lanes;
  for (int half = kScanLanes / 2; half >= 4; half /= 2)
    for (int l = 0; l < half; ++l) least[l] = least[l + half] < least[l] ? least[l + half] : least[l];
  float bound = least[0];
  for (int l = 1; l < 4; ++l)
    if (count == 1 ? least[l] < bound : least[l] > bound) bound = least[l];
  return bound;
}

static inline void OfferScores(const float* scores, int64_t columns, float bound, int64_t place, LeastScores* least) {
  const float last = least->scores[least->count - 1];
  const ScanFloats limit = ScanFloats{} + (last < bound ? last : bound);
  constexpr uint32_t kAll = (1u << kScanLanes) - 1;
  for (int64_t j = 0; j < columns; j += kScanLanes)
    // Scores that equal the limit may come first by their place.
    for (uint32_t offered = kAll & ~LanesAbove(*reinterpret_cast<const ScanFloats*>(scores + j), limit); offered != 0;
         offered &= offered - 1) {
      const int64_t at = j + __builtin_ctz(offered);
      least->Offer(scores[at], static_cast<int32_t>(place + at));
    }
}

static __attribute__((noinline)) void SearchCodebook(const CodeSearch& search, const SearchStep& step, int64_t term) {
  constexpr int kWide = kScanLanes == 16 ? 4 : 2;
  SearchScores scores;
  for (int64_t first = 0; first < search.stride; first += kSearchColumns) {
    const int64_t columns = search.stride - first < kSearchColumns ? search.stride - first : kSearchColumns;
    for (ScanFloats& least : scores.least) least = ScanFloats{} + __builtin_inff();
    int64_t column = 0;
    for (; column + kWide * kScanLanes <= columns; column += kWide * kScanLanes)
      SearchTile<kWide>(search, step, term, first, column, &scores);
    for (; column < columns; column += kScanLanes) SearchTile<1>(search, step, term, first, column, &scores);
    if (step.shared) {
      ScanFloats least = scores.least[0];
      for (int64_t i = 1; i < step.vectors; ++i) least = scores.least[i] < least ? scores.least[i] : least;
      const float bound = SearchBound(least, step.least->count);
      for (int64_t i = 0; i < step.vectors; ++i)
        OfferScores(scores.scores[i], columns, bound, first + i * search.size, step.least);
    } else {
      for (int64_t i = 0; i < step.vectors; ++i)
        OfferScores(scores.scores[i], columns, SearchBound(scores.least[i], step.least[i].count), first,
                    &step.least[i]);
    }
  }
}

static inline const float* CodebookRow(const CodeSearch& search, int64_t term, int64_t code) {
  return search.codebooks + (term * search.size + code) * search.width;
}

// Chooses the codes of up to kSearchRows rows from `first` on.
static void SearchRows(const CodeSearch& search, int64_t first) {
  const int64_t width = search.width, terms = search.terms, size = search.size;
  const int64_t rows = search.n - first < kSearchRows ? search.n - first : kSearchRows;
  const int64_t sums = kSearchRows * width, chosen_codes = kSearchRows * terms;
  // Of each row, up to kSearchRows remainders and the codes that have led to them; and those of the next step.
  float* const scaled = search.floats;
  float *left = scaled + sums, *next_left = left + kSearchRows * sums;
  int32_t *chosen = search.integers, *next_chosen = chosen + kSearchRows * chosen_codes;
  LeastScores least[kSearchRows];
  SearchStep step = {scaled, {}, rows, least, false};
  float errors[kSearchRows][kSearchRows] = {};

  const auto scale = [&](int64_t to, const float* from) {
    for (int64_t t = 0; t < width; ++t) scaled[to * width + t] = -2 * from[t];
  };
  const auto clear = [&](int64_t count) {
    for (int i = 0; i < kSearchRows; ++i) least[i].Clear(count);
  };
  const auto keep = [&](int64_t row, int64_t term, const LeastScores& best) {
    for (int64_t b = 0; b < best.count; ++b) {
      const uint32_t at = static_cast<uint32_t>(best.at[b]), divisor = static_cast<uint32_t>(size);
      const int64_t source = at / divisor, code = at % divisor;
      const float *from = left + row * sums + source * width, *entry = CodebookRow(search, term, code);
      float* const to = next_left + row * sums + b * width;
      for (int64_t t = 0; t < width; ++t) to[t] = from[t] - entry[t];
      const int32_t* const before = chosen + row * chosen_codes + source * terms;
      int32_t* const codes = next_chosen + row * chosen_codes + b * terms;
      for (int64_t k = 0; k < term; ++k) codes[k] = before[k];
      codes[term] = static_cast<int32_t>(code);
      errors[row][b] = best.scores[b];
    }
  };
  const auto swap = [&] {
    float* const rest = left;
    left = next_left;
    next_left = rest;
    int32_t* const codes = chosen;
    chosen = next_chosen;
    next_chosen = codes;
  };

  for (int64_t i = 0; i < kSearchRows; ++i) {
    const float* const row = search.rows + (first + (i < rows ? i : rows - 1)) * width;
    scale(i, row);
    for (int64_t t = 0; t < width; ++t) left[i * sums + t] = row[t];
  }
  int64_t kept = terms == 1 || search.beam < 1 ? 1 : search.beam < size ? search.beam : size;
  clear(kept);
  SearchCodebook(search, step, 0);
  for (int64_t row = 0; row < rows; ++row) keep(row, 0, least[row]);
  swap();
  step.shared = true;
  for (int64_t term = 1; term < terms; ++term) {
    const int64_t wanted = search.beam < kept * size ? search.beam : kept * size;
    step.vectors = kept;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t b = 0; b < kSearchRows; ++b) {
        const int64_t source = b < kept ? b : 0;
        scale(b, left + row * sums + source * width);
        step.error[b] = errors[row][source];
      }
      clear(wanted);
      SearchCodebook(search, step, term);
      keep(row, term, least[0]);
    }
    kept = wanted;
    swap();
  }

  step.shared = false;
  step.vectors = rows;
  for (float& error : step.error) error = 0;
  bool changed = terms > 1;
  for (int64_t sweep = 0; sweep < search.sweeps && changed; ++sweep) {
    changed = false;
    for (int64_t term = 0; term < terms; ++term) {
      for (int64_t row = 0; row < kSearchRows; ++row) {
        const int64_t source = row < rows ? row : 0;
        float* const rest = left + source * sums;
        const float* const entry = CodebookRow(search, term, chosen[source * chosen_codes + term]);
        if (row < rows)
          for (int64_t t = 0; t < width; ++t) rest[t] += entry[t];
        scale(row, rest);
      }
      clear(1);
      SearchCodebook(search, step, term);
      for (int64_t row = 0; row < rows; ++row) {
        int32_t& code = chosen[row * chosen_codes + term];
        changed |= code != least[row].at[0];
        code = least[row].at[0];
        const float* const entry = CodebookRow(search, term, code);
        for (int64_t t = 0; t < width; ++t) left[row * sums + t] -= entry[t];
      }
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t term = 0; term < terms; ++term)
      search.codes[(first + row) * terms + term] = chosen[row * chosen_codes + term];
}

static void SearchAllRows(const CodeSearch& search) {
  for (int64_t row = 0; row < search.n; row += kSearchRows) SearchRows(search, row);
}

}  // namespace jax_tt
