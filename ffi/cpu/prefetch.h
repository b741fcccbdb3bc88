// Asks for memory before it is needed.
#ifndef JAX_TT_CPU_PREFETCH_H_
#define JAX_TT_CPU_PREFETCH_H_

#include <stdint.h>

namespace jax_tt {

// GCC takes a function that does nothing but prefetch for one without effect, and drops the calls of it that it has not
// inlined by then; the empty statement keeps them.
inline void PrefetchLines(const void* data, int64_t bytes) {
  for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(static_cast<const char*>(data) + offset);
  asm volatile("");
}

}  // namespace jax_tt

#endif  // JAX_TT_CPU_PREFETCH_H_
