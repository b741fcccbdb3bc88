// The positions of all batches sorted by the row they read, so that the gradients of a row stand side by side.
#ifndef JAX_TT_CUDA_DENSE_SORT_H_
#define JAX_TT_CUDA_DENSE_SORT_H_

#include <stdint.h>

#include <vector>

#include "ffi/cuda/dense.h"
#include "ffi/cuda/table_launches.h"

namespace jax_tt {

// Sorted positions are looked at in tiles of as many as a word has bits.
constexpr int kDenseTile = 32;

// A row as one word that sorts, or as two where tables have that many rows.
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

// What a backward pass or update works with on one table.
struct TablePlan {
  static constexpr int32_t kPoisoned = -2;

  int64_t n, tiles;
  int32_t* flags;  // [kDenseFlags]

  // By position.
  RowKeys keys;
  int64_t first_key;
  int32_t* bag_of;  // [n] bag of a position, -1 where it reads no row, kPoisoned where it makes NaN of it

  // By sorted position.  Bit i of head[t]: a row begins at 32 t + i; from n on every bit is set.
  uint32_t* head;     // [tiles + 1]
  int64_t* row;       // [n]
  int32_t* bag;       // [n], -1 from the first that reads no row
  float* weight;      // [n]
  float* partial;     // [tiles, dim] sum of the part of a long row that a tile begins with
  int32_t* long_row;  // [tiles / 2] where long rows begin, in any order

  // The row that a position reads, or num_embeddings for none.
  __device__ __forceinline__ int64_t Row(int64_t position) const { return keys.Get(position) - first_key; }
};

// The workspace of a backward pass or update.  The rows of all tables are numbered through, and each table has one
// number more for reading no row, so that one sort leaves the positions of every table where they were, sorted.
struct DensePlan {
  int64_t positions = 0, tiles = 0, num_keys = 0, partials = 0, tables = 0;
  int32_t* flags = nullptr;
  RowKeys keys;
  int32_t* bag_of = nullptr;
  char* sorting = nullptr;   // what follows the flags
  RowKeys sorted;            // the keys in their order
  int32_t* order = nullptr;  // [positions] that have them
  uint32_t* head = nullptr;
  int64_t* row = nullptr;
  int32_t* bag = nullptr;
  float* weight = nullptr;
  float* partial = nullptr;
  int32_t* long_row = nullptr;
  int64_t bytes = 0;

  // Makes room for a table.
  Status Add(const DenseSize& size, PlanPlace* place);
  // Hands out the memory; with none only the number of bytes is of use.
  void Allocate(void* memory);

  __device__ __forceinline__ TablePlan Of(const GradientTable& table) const {
    const PlanPlace& place = table.place;
    const int64_t n = table.batch.n(), sorted = static_cast<int64_t>(place.tile) * kDenseTile;
    return {n,
            (n + kDenseTile - 1) / kDenseTile,
            flags + place.table * kDenseFlags,
            {keys.low + place.position, keys.high == nullptr ? nullptr : keys.high + place.position},
            place.key,
            bag_of + place.position,
            head + place.tile,
            row + sorted,
            bag + sorted,
            weight + sorted,
            partial + place.partial,
            long_row + place.tile};
  }
};

inline int64_t TilesOf(const GradientTable& table) { return (table.batch.n() + kDenseTile - 1) / kDenseTile; }

using GradientLaunches = TableLaunches<GradientTable>;

// The plan of these tables, whose places it sets, in memory of plan->bytes.
Status MakeDensePlan(std::vector<GradientTable>* tables, void* memory, DensePlan* plan);

// Adds what fills everything by position and by sorted position.  A batch with bad offsets reads no row.  With
// `all_or_none` neither does one with an id that makes NaN of its bag: what it does to a table could not be undone.
void AddSort(const DensePlan& plan, bool all_or_none, GradientLaunches& launches);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_SORT_H_
