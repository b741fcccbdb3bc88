// Rows of numbers of a few bits: scale and offset in float16, then the numbers, lowest bits first.  Number q stands for
// scale * level(q) + offset.
#pragma once

#include <stdint.h>

#include "ffi/core/host_device.h"

namespace jax_tt {

// A byte of such a row: the storage type of tables with kBits bits a number.
template <int kBits>
struct Packed {
  uint8_t byte;
};

template <typename T>
constexpr int kPackedBits = 0;  // of storage types that are no packed ones
template <int kBits>
constexpr int kPackedBits<Packed<kBits>> = kBits;

constexpr int64_t kPackedHeader = 4;

// What numbers of 2 to 4 bits stand for, before scale and offset.  Those of 8 bits stand for themselves.
struct PackedLevels {
  // Levels are whole numbers of 1 / kUnit below 16: products with a scale, which is a float16, are exact in float32.
  static constexpr int kUnit = 512;

  bool uniform = true;  // every number stands for itself
  float at[16] = {};    // level of a number, and again of the number with higher bits before it
};

JAX_TT_INLINE int64_t PackedRowBytes(int64_t dim, int bits) { return kPackedHeader + (dim * bits + 7) / 8; }

// Number i of those that begin at `codes`.
JAX_TT_INLINE uint32_t PackedCode(const uint8_t* codes, int64_t i, int bits) {
  const int64_t bit = i * bits;
  const int shift = static_cast<int>(bit % 8);
  uint32_t word = codes[bit / 8];
  // Only numbers of three bits can begin in one byte and end in the next.
  if (shift + bits > 8) word |= static_cast<uint32_t>(codes[bit / 8 + 1]) << 8;
  return word >> shift & ((1u << bits) - 1);
}

}  // namespace jax_tt
