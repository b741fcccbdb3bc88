// The tables of a launch, as its blocks find them.
#pragma once

#include <stdint.h>

#include "ffi/cuda/lanes.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// A table of a list and the first of its blocks; the last one is before the first of the next table.
struct TableBlocks {
  int32_t table, first;
};

// A block among those that work on the same table.
struct BlockOfTable {
  int64_t index, count;
};

// A list of one table travels as a parameter, so that nothing has to be written for it.
template <typename Table>
struct OneTable {
  // What keeps Find's table at hand in loops: parameters are, and reads of other memory would be repeated.
  using Held = const Table&;

  Table table;

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)
  __device__ __forceinline__ const Table& Find(BlockOfTable* own) const {
    *own = {static_cast<int64_t>(blockIdx.x), static_cast<int64_t>(gridDim.x)};
    return table;
  }
  __device__ __forceinline__ const Table& FindInPlace(BlockOfTable* own) const { return Find(own); }
#endif
};

template <typename Table>
struct ManyTables {
  using Held = const Table;

  const Table* tables = nullptr;        // of the call
  const TableBlocks* blocks = nullptr;  // [count], in the order of `first`, which begins at 0
  int count = 0;

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)
  // The table that this block works on.  Every lane of the warp must call this.
  __device__ __forceinline__ const Table& Find(BlockOfTable* own) const {
    // The lanes read the whole list side by side, which takes less time than a search, whose reads wait for each other.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int32_t block = static_cast<int32_t>(blockIdx.x);
    int begun = 0;
    for (int first = 0; first < count; first += 32)
      begun += __popc(__ballot_sync(kAllLanes, first + lane < count && blocks[first + lane].first <= block));
    const TableBlocks found = blocks[begun - 1];
    const int32_t end = begun < count ? blocks[begun].first : static_cast<int32_t>(gridDim.x);
    *own = {block - found.first, end - found.first};
    return tables[found.table];
  }
  __device__ __forceinline__ const Table& FindInPlace(BlockOfTable* own) const { return Find(own); }
#endif
};

// Either of them, for kernels that would take too long to compile for both.
template <typename Table>
struct TableList {
  OneTable<Table> one;
  ManyTables<Table> many;  // without tables where there is one

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)
  // A copy: a reference to either would be one to memory of an unknown kind.
  __device__ __forceinline__ Table Find(BlockOfTable* own) const {
    if (many.tables == nullptr) return one.Find(own);
    return many.Find(own);
  }

  // For tables that do not fit into registers: a copy would be in local memory.
  __device__ __forceinline__ const Table& FindInPlace(BlockOfTable* own) const {
    return many.tables == nullptr ? one.Find(own) : many.Find(own);
  }
#endif
};

}  // namespace jax_tt
