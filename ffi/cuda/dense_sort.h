// The positions of a batch sorted by the row they read, so that the gradients of a row stand side by side.
#ifndef JAX_TT_CUDA_DENSE_SORT_H_
#define JAX_TT_CUDA_DENSE_SORT_H_

#include <stdint.h>

#include "ffi/cuda/dense.h"

namespace jax_tt {

// Sorted positions are looked at in tiles of as many as a word has bits.
constexpr int kDenseTile = 32;

// A row as one word that sorts, or as two where tables have that many rows.  num_embeddings itself stands for reading
// no row, so that those positions come last.
struct RowKeys {
  int32_t* low = nullptr;   // [n]
  int32_t* high = nullptr;  // [n], or null; `low` then holds kLowBits
  static constexpr int kLowBits = 30;

  __device__ __forceinline__ int64_t Get(int64_t position) const {
    return high == nullptr ? low[position] : static_cast<int64_t>(high[position]) << kLowBits | low[position];
  }
  __device__ __forceinline__ void Set(int64_t position, int64_t key) const {
    if (high == nullptr) {
      low[position] = static_cast<int32_t>(key);
    } else {
      low[position] = static_cast<int32_t>(key & ((1 << kLowBits) - 1));
      high[position] = static_cast<int32_t>(key >> kLowBits);
    }
  }
};

// Words that kernels leave for later ones; all zero at the start.
enum DenseFlag { kBadOffsets = 0, kNonFinite = 1, kLongRows = 2, kBadIds = 3, kDenseFlags = 4 };

// The workspace of a backward pass or update.
struct DensePlan {
  static constexpr int32_t kPoisoned = -2;

  int64_t n = 0, tiles = 0;
  int32_t* flags = nullptr;   // [kDenseFlags]
  RowKeys keys;               // of positions
  int32_t* bag_of = nullptr;  // [n] bag of a position, -1 where it reads no row, kPoisoned where it makes NaN of it
  int32_t* orders[2] = {};    // [n] each, from one sort pass to the next
  char* sorting = nullptr;

  // By sorted position.  Bit i of head[t]: a row begins at 32 t + i; from n on every bit is set.
  uint32_t* head = nullptr;     // [tiles + 1]
  int64_t* row = nullptr;       // [n]
  int32_t* bag = nullptr;       // [n], -1 from the first that reads no row
  float* weight = nullptr;      // [n]
  float* partial = nullptr;     // [tiles, dim] sum of the part of a long row that a tile begins with
  int32_t* long_row = nullptr;  // [tiles / 2] where long rows begin, in any order

  int64_t bytes = 0;
};

// With a null workspace only the sizes are of use.
DensePlan MakeDensePlan(int64_t num_embeddings, int64_t dim, int64_t n, void* workspace);

// Sets `count` words of 32 bits to zero.
Status ZeroWords(cudaStream_t stream, void* words, int64_t count);

// Fills everything by position and by sorted position.  A batch with bad offsets reads no row.  With `all_or_none`
// neither does one with an id that makes NaN of its bag: what it does to a table could not be undone.
Status SortDenseBatch(cudaStream_t stream, const DenseBatch& batch, bool all_or_none, const DensePlan& plan);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_SORT_H_
