// Counts that blocks of one launch hand to the blocks after them.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "ffi/cuda/simt.h"

namespace jax_tt {

// What is known of tiles: how many one has of a bin, or how many all up to it have.  One word, so that it is there as
// a whole or not at all.
struct TileCount {
  static constexpr unsigned long long kOwn = 1ull << 62, kAll = 2ull << 62, kValue = kOwn - 1;

  // How many the tiles before this one have of a bin.  counts: of the bin, `bins` apart.  Tiles begin in their order,
  // so that all that are waited for have begun.
  static __device__ __forceinline__ int32_t Before(const volatile unsigned long long* counts, int64_t tile, int bins) {
    constexpr int kAhead = 8;
    unsigned long long sum = 0;
    for (int64_t at = tile - 1; at >= 0;) {
      unsigned long long word[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) word[k] = counts[max(at - k, int64_t{0}) * bins];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (at < 0 || word[k] == 0) break;  // no more tiles, or one that is not there yet and is read again
        sum += word[k] & kValue;
        if ((word[k] & kAll) != 0) return static_cast<int32_t>(sum);
        --at;
      }
    }
    return static_cast<int32_t>(sum);
  }
};

}  // namespace jax_tt
