// The optimizer state of a table in memory.
#pragma once

#include <stdint.h>

#include "ffi/core/half.h"
#include "ffi/core/host_device.h"
#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

// The slots with a number per element of the table come first, and have the type that rows are computed in, or are all
// of them bfloat16.  Those with one per row have that type.
struct SlotArrays {
  void* data[kMaxSlots] = {};
  bool narrow = false;

  template <typename C = float>
  JAX_TT_INLINE C* wide(int slot) const {
    return static_cast<C*>(data[slot]);
  }
  JAX_TT_INLINE bfloat16* rounded(int slot) const { return static_cast<bfloat16*>(data[slot]); }

  // A number of a slot of floats that has one per element.
  JAX_TT_INLINE float Get(int slot, int64_t element) const {
    return narrow ? ToCompute(rounded(slot)[element]) : wide(slot)[element];
  }
};

// Keeps the random numbers of the slots of a table apart from those of its elements, which have the number `table`.
JAX_TT_INLINE uint64_t SlotStream(uint64_t table, int slot) { return table + (static_cast<uint64_t>(slot) + 1) * 256; }

}  // namespace jax_tt
