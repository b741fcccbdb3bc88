// Rows of codes: numbers of a few bits, lowest bits first, each of which selects a row of its codebook.
#ifndef JAX_TT_CORE_CODED_ROWS_H_
#define JAX_TT_CORE_CODED_ROWS_H_

#include <stdint.h>

#include "ffi/core/host_device.h"

namespace jax_tt {

// A byte of such a row: the storage type of coded tables.
struct Coded {
  uint8_t byte;
};

// The codebooks of a table, one after another.
struct Codebooks {
  const float* rows = nullptr;  // [num_codes << bits, width]
  int64_t num_codes = 0, bits = 0, width = 0;
  bool product = false;  // rows are concatenations of codebook rows, or else their sums

  JAX_TT_INLINE int64_t dim() const { return product ? num_codes * width : width; }
  JAX_TT_INLINE int64_t row_bytes() const { return (num_codes * bits + 7) / 8; }
};

// Code i of a row, of at most 16 bits.
JAX_TT_INLINE uint32_t CodeAt(const uint8_t* row, int64_t i, int64_t bits) {
  const int64_t bit = i * bits;
  const int64_t shift = bit % 8;
  row += bit / 8;
  uint32_t word = row[0];
  // The bytes that the code does not reach may belong to another row, or to none.
  if (shift + bits > 8) word |= static_cast<uint32_t>(row[1]) << 8;
  if (shift + bits > 16) word |= static_cast<uint32_t>(row[2]) << 16;
  return word >> shift & ((1u << bits) - 1);
}

}  // namespace jax_tt

#endif  // JAX_TT_CORE_CODED_ROWS_H_
