// Rows of numbers of a few bits: scale and offset in float16, then the numbers, lowest bits first.  Number q stands for
// scale * q + offset.
#ifndef JAX_TT_CORE_PACKED_ROWS_H_
#define JAX_TT_CORE_PACKED_ROWS_H_

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

JAX_TT_INLINE int64_t PackedRowBytes(int64_t dim, int bits) { return kPackedHeader + (dim * bits + 7) / 8; }

}  // namespace jax_tt

#endif  // JAX_TT_CORE_PACKED_ROWS_H_
