// Rounding of updated rows to their storage type.
//
// The random bits of an element depend on the seed of the step and on where the element stands, not on which thread
// writes it, so that the CPU and the GPU round alike however the work is divided.
#pragma once

#include <stdint.h>

#include "ffi/core/half.h"
#include "ffi/core/host_device.h"

namespace jax_tt {

// 32 random bits for one element: the finaliser of MurmurHash3 over seed, row and column.
JAX_TT_INLINE uint32_t RandomBits(const uint32_t seed[2], uint64_t row, uint64_t column) {
  uint64_t x = (static_cast<uint64_t>(seed[1]) << 32 | seed[0]) + row * 0x9e3779b97f4a7c15u + column;
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdu;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53u;
  x ^= x >> 33;
  return static_cast<uint32_t>(x);
}

// How the elements of one row are rounded.
struct RowRounding {
  uint32_t seed[2];
  uint64_t row;  // of all tables that share a seed
  bool stochastic;

  // `table` keeps the random numbers of several tables apart.
  JAX_TT_INLINE RowRounding(const uint32_t* step_seed, uint64_t table, int64_t table_row, bool stochastic_rounding)
      : seed{step_seed[0], step_seed[1]},
        row((table << 48) + static_cast<uint64_t>(table_row)),
        stochastic(stochastic_rounding) {}

  template <typename T>
  JAX_TT_INLINE void Store(float value, int64_t column, T* out) const {
    if (stochastic)
      RoundStochastic(value, RandomBits(seed, row, static_cast<uint64_t>(column)), out);
    else
      Round(value, out);
  }
};

}  // namespace jax_tt
