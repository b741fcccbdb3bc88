// Rows of bytes in maps of files.
#pragma once

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#include <algorithm>
#include <bit>

#include "ffi/cpu/prefetch.h"

namespace jax_tt {

// Writes `n` rows of `bytes` bytes, given by their addresses, to the beginning of a file; returns the bytes written.
// The system reads the rows, so that those that cannot be read are missing, where a load would raise a signal.
inline int64_t WriteRows(int file, const uint64_t* rows, int64_t n, int64_t bytes) {
  constexpr int kMost = 256;  // of the 1024 that the system takes, so that all of them stay in the cache
  int64_t done = 0;
  while (done < n * bytes) {
    iovec parts[kMost];
    int count = 0;
    int64_t skipped = done % bytes;
    for (int64_t k = done / bytes; k < n; ++k, skipped = 0) {
      const uint64_t row = rows[k] + static_cast<uint64_t>(skipped), size = static_cast<uint64_t>(bytes - skipped);
      iovec* const last = count ? &parts[count - 1] : nullptr;
      if (last != nullptr && reinterpret_cast<uint64_t>(last->iov_base) + last->iov_len == row) {
        last->iov_len += size;
        continue;
      }
      if (count == kMost) break;
      parts[count++] = {reinterpret_cast<void*>(row), size};
      // The system waits for every row; a prefetch of memory that is not there has no effect.
      PrefetchLines(reinterpret_cast<const void*>(row), std::min<int64_t>(bytes, 4096));
    }
    const ssize_t written = pwritev(file, parts, count, done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    done += written;
  }
  return done;
}

// The sum of words of 32 bits, the last one with zeros behind it, times factors of 64 bits.
inline uint64_t Checksum(const uint8_t* row, size_t bytes, const uint64_t* factors) {
  static_assert(std::endian::native == std::endian::little);
  uint64_t first = 0, second = 0, pair = 0;
  size_t k = 0;
  for (; 4 * k + 8 <= bytes; k += 2) {
    memcpy(&pair, row + 4 * k, 8);
    first += (pair & UINT32_MAX) * factors[k];
    second += (pair >> 32) * factors[k + 1];
  }
  if (4 * k < bytes) {
    pair = 0;
    memcpy(&pair, row + 4 * k, bytes - 4 * k);
    first += (pair & UINT32_MAX) * factors[k];
    if (4 * k + 4 < bytes) second += (pair >> 32) * factors[k + 1];
  }
  return first + second;
}

}  // namespace jax_tt
