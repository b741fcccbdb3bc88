// The positions of a batch sorted by the row they read, so that the gradients of a row stand side by side.
#pragma once

#include <stdint.h>

#include <vector>

#include "ffi/cuda/dense/dense.h"
#include "ffi/cuda/lanes.h"
#include "ffi/cuda/tables/launches.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {

// A row that more positions read is a long one, which is summed in several pieces.  Sorted positions are divided into
// pieces of as many.
constexpr int kDensePiece = 64;

// A row as one word that sorts, or as two where tables have that many rows.
struct RowKeys {
  int32_t* low = nullptr;   // [n]
  int32_t* high = nullptr;  // [n], or null; `low` then holds kLowBits
  static constexpr int kLowBits = 30;

  JAX_TT_INLINE RowKeys From(int64_t position) const {
    return {low + position, high == nullptr ? nullptr : high + position};
  }
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

// What is wrong with a batch.
enum BadBatch : int32_t { kBadOffsets = 1, kBadIds = 2 };

// Words of a table that kernels leave for later ones.  The first are BadBatch each, one for every block that looks.
enum DenseFlag { kBadWords = 32, kNonFinite = kBadWords, kLongRows, kDenseFlags };

// What is added, in this order, to the first sum of a long row: `count` sums of TablePlan::partial.
struct MorePieces {
  int32_t first, count;
};

// What a backward pass or update works with on one table.
struct TablePlan {
  int64_t n, pieces;
  int32_t* flags;  // [kDenseFlags]
  bool all_or_none;

  // By sorted position.
  RowKeys keys;
  int64_t first_key;
  int32_t* bag;   // [n], of no use where no row is read
  float* weight;  // [n], not set if there are no weights

  // Of long rows.
  float* partial;     // [.., dim] sums of pieces
  MorePieces* more;   // [pieces + 1]
  int32_t* long_row;  // [pieces] where long rows begin, in any order

  // The row that a sorted position reads, or num_embeddings for none.
  __device__ __forceinline__ int64_t Row(int64_t i) const { return keys.Get(i) - first_key; }

  // Every lane of the warp must call this.
  __device__ __forceinline__ bool Has(int32_t bad) const {
    return __any_sync(kAllLanes, (flags[threadIdx.x % kBadWords] & bad) != 0);
  }
  // Whether the batch reads no row.  Every lane of the warp must call this.
  __device__ __forceinline__ bool Refused() const { return Has(all_or_none ? kBadOffsets | kBadIds : kBadOffsets); }

  // Where the sum of the long row that begins at a sorted position is: behind the piece of its beginning, which may
  // have a sum of the row before it.
  __device__ __forceinline__ uint32_t LongRowPlace(uint32_t begin) const { return begin / kDensePiece + 1; }
};

// Batches of so few ids are sorted by one launch, which holds rows, and reasons for reading none, in 32 bits.
JAX_TT_INLINE bool SplitsRows(int64_t n, int64_t num_embeddings) {
  constexpr int64_t kMostIds = 65'536, kReasons = 3;
  return n <= kMostIds && num_embeddings <= UINT32_MAX - kReasons;
}
inline bool SplitsRows(const GradientTable& table) { return SplitsRows(table.batch.n(), table.batch.num_embeddings); }

// The blocks of that launch that sort a table's rows.  Each reads all ids; where those are few, tables are often many,
// and have fewer blocks, so that all run at the same time.
JAX_TT_INLINE int64_t SplitBlocks(int64_t n) {
  constexpr int64_t kMost = 128, kFew = 4096;
  const int64_t blocks = n / (n < kFew ? 256 : 160);
  return blocks > kMost ? kMost : blocks > 0 ? blocks : n > 0;
}

// The workspace of a backward pass or update.  The rows of all tables whose ids are sorted together are numbered
// through, and each table has one number more for reading no row, so that one sort leaves the positions of every table
// where they were, sorted.  These tables come first.
struct DensePlan {
  int64_t positions = 0, sorted_together = 0, pieces = 0, num_keys = 0, partials = 0, tables = 0;
  bool two_words = false;    // of a key
  bool all_or_none = false;  // an id that makes NaN of its bag keeps its table from a step, which could not be undone
  bool weighted = false;     // tables whose ids are sorted together, any of them
  int32_t* flags = nullptr;
  char* sorting = nullptr;  // what follows the flags
  // By position, of ids that are sorted together.
  RowKeys keys;
  int32_t* bag_of = nullptr;
  float* weight_of = nullptr;
  uint64_t* split = nullptr;  // [positions - sorted_together] what does not fit into the shared memory of a block
  // By sorted position.
  RowKeys sorted;
  int32_t* bag = nullptr;
  float* weight = nullptr;
  float* partial = nullptr;
  MorePieces* more = nullptr;
  int32_t* long_row = nullptr;
  int64_t bytes = 0;

  // Makes room for tables; sets their places, in the same order.
  Status Add(const std::vector<DenseSize>& sizes, std::vector<PlanPlace>* places);
  // Hands out the memory; with none only the number of bytes is of use.
  void Allocate(void* memory);

  __device__ __forceinline__ TablePlan Of(const GradientTable& table) const {
    const PlanPlace& place = table.place;
    const int64_t n = table.batch.n();
    return {n,
            (n + kDensePiece - 1) / kDensePiece,
            flags + place.table * kDenseFlags,
            all_or_none,
            sorted.From(place.position),
            place.key,
            bag + place.position,
            weight + place.position,
            partial + place.partial,
            more + place.piece,
            long_row + place.piece};
  }

 private:
  Status AddOne(const DenseSize& size, PlanPlace* place);
};

using GradientLaunches = TableLaunches<GradientTable>;

// The plan of these tables, whose places it sets, in memory of plan->bytes.
Status MakeDensePlan(std::vector<GradientTable>* tables, bool all_or_none, void* memory, DensePlan* plan);

// Adds what fills everything by sorted position.
void AddPlan(const DensePlan& plan, GradientLaunches& launches);

// The two ways to do that: of tables for which SplitsRows, and of the others.
void AddSplit(const DensePlan& plan, GradientLaunches& launches);
void AddSort(const DensePlan& plan, GradientLaunches& launches);

// Takes the memory of AddSort that has to be zero at the start, which follows the flags.
void PlaceSort(const DensePlan& plan, Workspace& workspace);

}  // namespace jax_tt
