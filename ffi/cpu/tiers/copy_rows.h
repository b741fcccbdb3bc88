// Copies of rows from some places in memory to others.
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "ffi/cpu/prefetch.h"

namespace jax_tt {

// Copies `bytes` bytes from every address to the one beside it; no target overlaps another row.
inline void CopyRows(const uint64_t* from, const uint64_t* to, int64_t n, int64_t bytes) {
  constexpr int64_t kAhead = 8;
  const int64_t fetched = std::min<int64_t>(bytes, 512);
  for (int64_t k = 0; k < n; ++k) {
    if (k + kAhead < n) {
      PrefetchLines(reinterpret_cast<const void*>(from[k + kAhead]), fetched);
      PrefetchLines(reinterpret_cast<const void*>(to[k + kAhead]), fetched);
    }
    memcpy(reinterpret_cast<void*>(to[k]), reinterpret_cast<const void*>(from[k]), static_cast<size_t>(bytes));
  }
}

}  // namespace jax_tt
