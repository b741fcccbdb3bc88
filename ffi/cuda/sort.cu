#include <algorithm>

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/sort.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
// Positions that one block takes.  A batch that fits is sorted by one launch, all passes in one block.
constexpr int64_t kTile = 8192, kSingleTile = 16384;

struct BlockSort {
  SortPass pass[kMaxSortPasses];
  int32_t* order[kMaxSortPasses];
  int count, max_bins;
  int64_t n;
  const int32_t* skip;
};

// One pass over a batch of many tiles.  counts: [bins, tiles], then the first place of each.
struct TilePass {
  SortPass pass;
  const int32_t* order;
  int64_t n, tiles;
  int32_t *counts, *sorted;
  const int32_t* skip;
};

// Positions of a block and their digits.  A warp has 32 * kItems adjacent ones, in rounds of 32, so that their order is
// kept; they are all asked for before the first is used.
template <int kItems>
struct Items {
  int32_t position[kItems];
  int32_t digit[kItems];  // -1 past the end: a digit that no position has

  __device__ __forceinline__ void Load(const SortPass& pass, const int32_t* order, int64_t first, int64_t last) {
    const int64_t begin = first + threadIdx.x / 32 * (32 * kItems) + threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int64_t i = begin + 32 * k;
      position[k] = i >= last ? -1 : order == nullptr ? static_cast<int32_t>(i) : order[i];
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      digit[k] = position[k] < 0 ? -1 : (pass.digits[position[k]] >> pass.shift) & pass.mask;
  }
};

// counters[warp * bins + bin]: how often a bin occurs in the part of a warp.
template <int kItems>
__device__ void CountDigits(const SortPass& pass, const Items<kItems>& items, Shared<int32_t> counters) {
  for (int i = threadIdx.x; i < kWarps * pass.bins; i += kThreads) counters[i] = 0;
  __syncthreads();
  const Shared<int32_t> own = counters + static_cast<int>(threadIdx.x / 32) * pass.bins;
#pragma unroll
  for (int k = 0; k < kItems; ++k)
    if (items.digit[k] >= 0) atomicAdd(own + items.digit[k], 1);
  __syncthreads();
}

// Turns the counts of the warps into the places of their first position; start(bin) is that of the block.
template <typename Start>
__device__ void PlaceWarps(int bins, Shared<int32_t> counters, Start start) {
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    int32_t place = start(bin);
    for (int warp = 0; warp < kWarps; ++warp) {
      const int32_t count = counters[warp * bins + bin];
      counters[warp * bins + bin] = place;
      place += count;
    }
  }
  __syncthreads();
}

template <int kItems>
__device__ void Scatter(const SortPass& pass, const Items<kItems>& items, Shared<int32_t> counters, int32_t* sorted) {
  const int lane = threadIdx.x % 32;
  const Shared<int32_t> own = counters + static_cast<int>(threadIdx.x / 32) * pass.bins;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int digit = items.digit[k];
    const unsigned peers = __match_any_sync(kAllLanes, digit);
    const int rank = __popc(peers & ((1u << lane) - 1));
    int32_t place = 0;
    if (digit >= 0) {
      place = own[digit];
      sorted[place + rank] = items.position[k];
    }
    __syncwarp();
    if (digit >= 0 && rank == 0) own[digit] = place + __popc(peers);
    __syncwarp();
  }
}

size_t SharedForBins(int max_bins) {
  return sizeof(int32_t) * ((kWarps + 1) * static_cast<size_t>(max_bins) + kMaxWarps) + 64;
}

template <int kItems, typename Tables>
__global__ void __launch_bounds__(kThreads) SortInOneBlock(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const BlockSort& sort = tables.Find(&block);
  if (sort.skip != nullptr && *sort.skip) return;
  SharedArena arena;
  const Shared<int32_t> counters = arena.Take<int32_t>(kWarps * sort.max_bins);
  const Shared<int32_t> starts = arena.Take<int32_t>(sort.max_bins);
  const Shared<int32_t> sums = arena.Take<int32_t>(kMaxWarps);
  const int32_t* order = nullptr;
  for (int k = 0; k < sort.count; ++k) {
    const SortPass& pass = sort.pass[k];
    Items<kItems> items;
    items.Load(pass, order, 0, sort.n);
    CountDigits(pass, items, counters);
    for (int bin = threadIdx.x; bin < pass.bins; bin += kThreads) {
      int32_t count = 0;
      for (int warp = 0; warp < kWarps; ++warp) count += counters[warp * pass.bins + bin];
      starts[bin] = count;
    }
    __syncthreads();
    ScanArray(starts, pass.bins, sums);
    PlaceWarps(pass.bins, counters, [&](int bin) { return static_cast<int32_t>(starts[bin]); });
    Scatter(pass, items, counters, sort.order[k]);
    order = sort.order[k];
    __syncthreads();
  }
}

constexpr int kTileItems = static_cast<int>(kTile / kThreads);

template <typename Tables>
__global__ void __launch_bounds__(kThreads) CountTiles(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const TilePass& own = tables.Find(&block);
  if (own.skip != nullptr && *own.skip) return;
  SharedArena arena;
  const Shared<int32_t> counters = arena.Take<int32_t>(kWarps * own.pass.bins);
  const int64_t first = block.index * kTile;
  Items<kTileItems> items;
  items.Load(own.pass, own.order, first, min(own.n, first + kTile));
  CountDigits(own.pass, items, counters);
  for (int bin = threadIdx.x; bin < own.pass.bins; bin += kThreads) {
    int32_t count = 0;
    for (int warp = 0; warp < kWarps; ++warp) count += counters[warp * own.pass.bins + bin];
    own.counts[bin * own.tiles + block.index] = count;
  }
}

template <typename Tables>
__global__ void __launch_bounds__(kThreads) ScanCounts(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const TilePass& own = tables.Find(&block);
  if (own.skip != nullptr && *own.skip) return;
  SharedArena arena;
  ScanArray(own.counts, own.pass.bins * own.tiles, arena.Take<int32_t>(kMaxWarps));
}

template <typename Tables>
__global__ void __launch_bounds__(kThreads) ScatterTiles(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const TilePass& own = tables.Find(&block);
  if (own.skip != nullptr && *own.skip) return;
  SharedArena arena;
  const Shared<int32_t> counters = arena.Take<int32_t>(kWarps * own.pass.bins);
  const int64_t tile = block.index, first = tile * kTile;
  Items<kTileItems> items;
  items.Load(own.pass, own.order, first, min(own.n, first + kTile));
  CountDigits(own.pass, items, counters);
  PlaceWarps(own.pass.bins, counters, [&](int bin) { return own.counts[bin * own.tiles + tile]; });
  Scatter(own.pass, items, counters, own.sorted);
}

template <int kItems>
constexpr TableKernel kSortInOneBlock = TableKernelOf<BlockSort, SortInOneBlock<kItems, OneTable<BlockSort>>,
                                                      SortInOneBlock<kItems, ManyTables<BlockSort>>, kThreads>::kKernel;
constexpr TableKernel kCountTiles =
    TableKernelOf<TilePass, CountTiles<OneTable<TilePass>>, CountTiles<ManyTables<TilePass>>, kThreads>::kKernel;
constexpr TableKernel kScanCounts =
    TableKernelOf<TilePass, ScanCounts<OneTable<TilePass>>, ScanCounts<ManyTables<TilePass>>, kThreads>::kKernel;
constexpr TableKernel kScatterTiles =
    TableKernelOf<TilePass, ScatterTiles<OneTable<TilePass>>, ScatterTiles<ManyTables<TilePass>>, kThreads>::kKernel;

}  // namespace

int AddSortPasses(const int32_t* word, int bits, SortPass* passes) {
  constexpr int kMaxBits = 10;
  const int count = (bits + kMaxBits - 1) / kMaxBits, each = count == 0 ? 0 : (bits + count - 1) / count;
  for (int k = 0; k < count; ++k) {
    const int bins = 1 << std::min(each, bits - k * each);
    passes[k] = {word, bins, k * each, bins - 1};
  }
  return count;
}

int64_t SortWorkspace(int64_t n, int max_bins) {
  return n <= kSingleTile ? 0 : (n + kTile - 1) / kTile * max_bins * static_cast<int64_t>(sizeof(int32_t));
}

void StableSort(TableQueue& queue, int64_t n, const SortPass* passes, int num_passes, int32_t* const* orders,
                void* workspace, const int32_t* skip) {
  if (n == 0) return;
  if (n <= kSingleTile) {
    BlockSort sort{};
    sort.count = num_passes;
    sort.max_bins = 1;
    sort.n = n;
    sort.skip = skip;
    for (int k = 0; k < num_passes; ++k) {
      sort.max_bins = std::max(sort.max_bins, passes[k].bins);
      sort.pass[k] = passes[k];
      sort.order[k] = orders[k];
    }
    const TableKernel& kernel = n <= 8 * kThreads    ? kSortInOneBlock<8>
                                : n <= 16 * kThreads ? kSortInOneBlock<16>
                                : n <= 24 * kThreads ? kSortInOneBlock<24>
                                                     : kSortInOneBlock<32>;
    return queue.Add(kernel, 1, SharedForBins(sort.max_bins), sort);
  }
  const int64_t tiles = (n + kTile - 1) / kTile;
  const int32_t* order = nullptr;
  for (int k = 0; k < num_passes; ++k) {
    const size_t shared = SharedForBins(passes[k].bins);
    const TilePass pass{passes[k], order, n, tiles, static_cast<int32_t*>(workspace), orders[k], skip};
    queue.Add(kCountTiles, tiles, shared, pass);
    queue.Add(kScanCounts, 1, SharedForBins(1), pass);
    queue.Add(kScatterTiles, tiles, shared, pass);
    order = orders[k];
  }
}

}  // namespace jax_tt
