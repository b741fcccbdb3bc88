// Stable counting sorts of positions by small digits: the order of a batch, and on the way every order it passes
// through.
#ifndef JAX_TT_CUDA_SORT_H_
#define JAX_TT_CUDA_SORT_H_

#include <stdint.h>

#include "ffi/cuda/table_queue.h"

namespace jax_tt {

// Bins of one pass: ten bits, and one more for positions that contribute nothing.
constexpr int kMaxBins = 1025;
constexpr int kMaxSortPasses = 16;

// One pass sorts by (digits[position] >> shift) & mask, which lies in [0, bins).
struct SortPass {
  const int32_t* digits = nullptr;
  int bins = 1;
  int shift = 0;
  int32_t mask = -1;
};

// Sets the passes that sort a word of this many bits, as even as they come: fewer bins make a pass cheaper.  Returns
// how many.
int AddSortPasses(const int32_t* word, int bits, SortPass* passes);

// Bytes of workspace for n positions.
int64_t SortWorkspace(int64_t n, int max_bins);

// orders[k]: [n], the positions as they stand after pass k, the least significant pass first.  Orders may share memory
// with each other only where neither is the input of the other.  Where `skip` points to anything but 0 nothing is done.
void StableSort(TableQueue& queue, int64_t n, const SortPass* passes, int num_passes, int32_t* const* orders,
                void* workspace, const int32_t* skip = nullptr);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_SORT_H_
