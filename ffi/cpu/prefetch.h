// Prefetching of memory.
#pragma once

#include <stdint.h>

namespace jax_tt {

// GCC considers a function that only prefetches free of effects and may remove calls to it; the empty asm statement
// prevents this.
inline void PrefetchLines(const void* data, int64_t bytes) {
  for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(static_cast<const char*>(data) + offset);
  asm volatile("");
}

}  // namespace jax_tt
