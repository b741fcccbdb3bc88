// Huge pages for large memory.
#pragma once

#include <stddef.h>
#include <stdint.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_tt {

constexpr int64_t kHugePage = int64_t{2} << 20;

// Asks for huge pages in [data, data + size), which is about to be written.  XLA allocates large results anew in every
// step, and the faults of their small pages can take longer than writing them.  Only a hint, which may fail.
inline void PreferHugePages(void* data, int64_t size) {
#if defined(MADV_HUGEPAGE)
  constexpr auto kPage = static_cast<uintptr_t>(kHugePage);
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (start + kPage - 1) / kPage * kPage,
                  end = (start + static_cast<uintptr_t>(size)) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(end - begin), MADV_HUGEPAGE);
#endif
}

}  // namespace jax_tt
