// Prefetching of memory.
#ifndef JAX_TT_CPU_PREFETCH_H_
#define JAX_TT_CPU_PREFETCH_H_

#include <stdint.h>

namespace jax_tt {

// GCC considers a function that only prefetches free of effects and may remove calls to it; the empty asm statement
// prevents this.
inline void PrefetchLines(const void* data, int64_t bytes) {
  for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(static_cast<const char*>(data) + offset);
  asm volatile("");
}

}  // namespace jax_tt

#endif  // JAX_TT_CPU_PREFETCH_H_
