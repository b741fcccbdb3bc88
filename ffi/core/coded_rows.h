// Rows of codes: numbers of a few bits, lowest bits first, each of which selects a row of its codebook.
#pragma once

#include <stdint.h>

#include "ffi/core/host_device.h"

namespace jax_tt {

// A byte of such a row: the storage type of coded tables.
struct Coded {
  uint8_t byte;
};

// Rows whose codes are unpacked together.
constexpr int64_t kCodedRows = 32;

// The codebooks of a table, one after another.  Its columns are divided into parts, each of which is a sum: of the
// codebook rows that `terms` codes of every row select, and of `hot_terms` more of hot rows.  A part has the codebooks
// of all rows and then those of hot ones.
struct Codebooks {
  const float* rows = nullptr;  // [parts * (terms + hot_terms) << bits, width]
  int64_t parts = 0, terms = 0, hot_terms = 0, bits = 0, width = 0;
  // Of hot rows, if there are any.
  const uint8_t* hot_codes = nullptr;    // [num_hot, hot_bytes()]
  const uint32_t* hot_places = nullptr;  // [blocks, 1 + kHotWords]
  int64_t num_hot = 0;

  JAX_TT_INLINE int64_t dim() const { return parts * width; }
  // Integers for so many unpacked codes of a row, and for those of kCodedRows rows and as many hot ones.
  JAX_TT_INLINE static int64_t Unpacked(int64_t codes) { return (codes + 3) / 4 * 4; }
  JAX_TT_INLINE int64_t unpacked() const {
    return kCodedRows * (Unpacked(parts * terms) + Unpacked(parts * hot_terms));
  }
  JAX_TT_INLINE int64_t row_bytes() const { return (parts * terms * bits + 7) / 8; }
  JAX_TT_INLINE int64_t hot_bytes() const { return (parts * hot_terms * bits + 7) / 8; }
};

// Hot rows are listed in blocks of so many words of 32 rows, a bit for each row, after the number of hot rows before
// the block.
constexpr int64_t kHotWords = 16;
constexpr int64_t kHotBlock = 32 * kHotWords;

// Where the further codes of a row are among those of hot rows; -1 if it is not hot.
JAX_TT_INLINE int64_t HotPlace(const Codebooks& books, int64_t row) {
  const uint32_t* const block = books.hot_places + row / kHotBlock * (1 + kHotWords);
  const uint32_t* const words = block + 1;
  const int64_t word = row / 32 % kHotWords;
  const uint32_t bit = 1u << (row % 32);
  if ((words[word] & bit) == 0) return -1;
  int64_t place = block[0] + __builtin_popcount(words[word] & (bit - 1));
  for (int64_t k = 0; k < word; ++k) place += __builtin_popcount(words[k]);
  return place < books.num_hot ? place : -1;
}

}  // namespace jax_tt
