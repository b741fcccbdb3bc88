// A sort of the few keys of one block.
#pragma once

#include <stdint.h>

#include "ffi/cuda/simt.h"

namespace jax_tt {

// Sorts keys of which no two are equal, by Batcher's merge exchange: compared are pairs of places that do not depend on
// the keys, so that threads have equal shares of every round.  Every thread of the block must call this.
template <int kThreads, typename Keys>
__device__ void SortKeys(Keys keys, int count) {
  int top = 1;
  while (2 * top < count) top *= 2;
  if (count < 2) return;
  for (int run = top; run > 0; run /= 2) {
    int distance = run, offset = 0;
    for (int other = top;; other /= 2) {
      for (int pair = threadIdx.x;; pair += kThreads) {
        const int place = ((pair & -run) << 1) + (pair & (run - 1)) + offset;
        if (place + distance >= count) break;
        const uint64_t low = keys[place], high = keys[place + distance];
        if (low > high) {
          keys[place] = high;
          keys[place + distance] = low;
        }
      }
      __syncthreads();
      if (other == run) break;
      distance = other - run;
      offset = run;
    }
  }
}

}  // namespace jax_tt
