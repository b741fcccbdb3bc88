// Columns of a row of a table, as they are stored and as numbers.
#pragma once

#include <stdint.h>

#include "ffi/core/packed_rows.h"
#include "ffi/cuda/dense/dense.h"
#include "ffi/cuda/dense/lanes.h"

namespace jax_tt {

// V adjacent columns of a row of numbers of type T.
template <typename T, int V>
struct Columns {
  Packet<T, V> stored;

  static __device__ __forceinline__ Columns Load(const ForwardTable& table, int64_t row, int column) {
    return {LoadPacket<V>(static_cast<const T*>(table.values) + row * table.batch.dim + column)};
  }
  __device__ __forceinline__ Packet<float, V> Numbers(const ForwardTable&, const PackedLevels&) const {
    Packet<float, V> numbers;
    for (int v = 0; v < V; ++v) numbers.x[v] = ToCompute(stored.x[v]);
    return numbers;
  }
};

// The same of a packed row, which begins at a multiple of 4 bytes and has whole words if V is 4.
template <int V>
struct Columns<PackedRow, V> {
  uint32_t header;  // scale and offset
  uint32_t codes;   // V of them, the first in the lowest bits

  static __device__ __forceinline__ Columns Load(const ForwardTable& table, int64_t row, int column) {
    const uint8_t* const bytes =
        static_cast<const uint8_t*>(table.values) + row * PackedRowBytes(table.batch.dim, table.bits);
    if constexpr (V == 1) {
      const uint32_t header = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24;
      return {header, PackedCode(bytes + kPackedHeader, column, table.bits)};
    } else {
      const int64_t bit = int64_t{column} * table.bits;
      const int shift = static_cast<int>(bit % 32);
      const uint8_t* const from = bytes + kPackedHeader + bit / 32 * 4;
      uint32_t codes = Word(from) >> shift;
      // Those of 3 bits can begin in one word and end in the next.
      if (shift + V * table.bits > 32) codes |= Word(from + 4) << (32 - shift);
      return {Word(bytes), codes};
    }
  }
  __device__ __forceinline__ Packet<float, V> Numbers(const ForwardTable& table, const PackedLevels& levels) const {
    const float scale = ToCompute(float16{static_cast<uint16_t>(header)});
    const float offset = ToCompute(float16{static_cast<uint16_t>(header >> 16)});
    const uint32_t highest = (1u << table.bits) - 1;
    Packet<float, V> numbers;
    for (int v = 0; v < V; ++v) {
      const uint32_t code = codes >> v * table.bits & highest;
      const float level = levels.uniform ? static_cast<float>(code) : levels.at[code];
      numbers.x[v] = scale * level + offset;
    }
    return numbers;
  }

 private:
  static __device__ __forceinline__ uint32_t Word(const uint8_t* from) {
    return LoadPacket<1>(reinterpret_cast<const uint32_t*>(from)).x[0];
  }
};

}  // namespace jax_tt
