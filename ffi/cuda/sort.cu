#include <algorithm>

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/sort.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
// Positions that one block takes.  A batch that fits is sorted by one launch, all passes in one block.
constexpr int64_t kTile = 8192, kSingleTile = 16384;

struct Passes {
  SortPass pass[kMaxSortPasses];
  int32_t* order[kMaxSortPasses];
  int count;
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

int64_t SharedForBins(int max_bins) {
  return static_cast<int64_t>(sizeof(int32_t)) * ((kWarps + 1) * static_cast<int64_t>(max_bins) + kMaxWarps) + 64;
}

template <int kItems>
__global__ void __launch_bounds__(kThreads)
    SortInOneBlock(const __grid_constant__ Passes passes, int64_t n, int max_bins, const int32_t* skip) {
  if (skip != nullptr && *skip) return;
  SharedArena arena;
  const Shared<int32_t> counters = arena.Take<int32_t>(kWarps * max_bins);
  const Shared<int32_t> starts = arena.Take<int32_t>(max_bins);
  const Shared<int32_t> sums = arena.Take<int32_t>(kMaxWarps);
  const int32_t* order = nullptr;
  for (int k = 0; k < passes.count; ++k) {
    const SortPass& pass = passes.pass[k];
    Items<kItems> items;
    items.Load(pass, order, 0, n);
    CountDigits(pass, items, counters);
    for (int bin = threadIdx.x; bin < pass.bins; bin += kThreads) {
      int32_t count = 0;
      for (int warp = 0; warp < kWarps; ++warp) count += counters[warp * pass.bins + bin];
      starts[bin] = count;
    }
    __syncthreads();
    ScanArray(starts, pass.bins, sums);
    PlaceWarps(pass.bins, counters, [&](int bin) { return static_cast<int32_t>(starts[bin]); });
    Scatter(pass, items, counters, passes.order[k]);
    order = passes.order[k];
    __syncthreads();
  }
}

constexpr int kTileItems = static_cast<int>(kTile / kThreads);

// counts[bin * tiles + tile]
__global__ void __launch_bounds__(kThreads) CountTiles(const __grid_constant__ SortPass pass, const int32_t* order,
                                                       int64_t n, int64_t tiles, int32_t* counts, const int32_t* skip) {
  if (skip != nullptr && *skip) return;
  SharedArena arena;
  const Shared<int32_t> counters = arena.Take<int32_t>(kWarps * pass.bins);
  const int64_t first = blockIdx.x * kTile;
  Items<kTileItems> items;
  items.Load(pass, order, first, min(n, first + kTile));
  CountDigits(pass, items, counters);
  for (int bin = threadIdx.x; bin < pass.bins; bin += kThreads) {
    int32_t count = 0;
    for (int warp = 0; warp < kWarps; ++warp) count += counters[warp * pass.bins + bin];
    counts[bin * tiles + blockIdx.x] = count;
  }
}

__global__ void __launch_bounds__(kThreads) ScanCounts(int32_t* counts, int64_t count, const int32_t* skip) {
  if (skip != nullptr && *skip) return;
  SharedArena arena;
  ScanArray(counts, count, arena.Take<int32_t>(kMaxWarps));
}

__global__ void __launch_bounds__(kThreads)
    ScatterTiles(const __grid_constant__ SortPass pass, const int32_t* order, int64_t n, int64_t tiles,
                 const int32_t* starts, int32_t* sorted, const int32_t* skip) {
  if (skip != nullptr && *skip) return;
  SharedArena arena;
  const Shared<int32_t> counters = arena.Take<int32_t>(kWarps * pass.bins);
  const int64_t tile = blockIdx.x, first = tile * kTile;
  Items<kTileItems> items;
  items.Load(pass, order, first, min(n, first + kTile));
  CountDigits(pass, items, counters);
  PlaceWarps(pass.bins, counters, [&](int bin) { return starts[bin * tiles + tile]; });
  Scatter(pass, items, counters, sorted);
}

}  // namespace

int64_t SortWorkspace(int64_t n, int max_bins) {
  return n <= kSingleTile ? 0 : (n + kTile - 1) / kTile * max_bins * static_cast<int64_t>(sizeof(int32_t));
}

Status StableSort(cudaStream_t stream, int64_t n, const SortPass* passes, int num_passes, int32_t* const* orders,
                  void* workspace, const int32_t* skip) {
  if (n == 0) return {};
  int max_bins = 1;
  for (int k = 0; k < num_passes; ++k) max_bins = std::max(max_bins, passes[k].bins);
  if (n <= kSingleTile) {
    Passes all{};
    all.count = num_passes;
    for (int k = 0; k < num_passes; ++k) {
      all.pass[k] = passes[k];
      all.order[k] = orders[k];
    }
    const auto kernel = n <= 8 * kThreads    ? SortInOneBlock<8>
                        : n <= 16 * kThreads ? SortInOneBlock<16>
                        : n <= 24 * kThreads ? SortInOneBlock<24>
                                             : SortInOneBlock<32>;
    return Launch(stream, 1, kThreads, SharedForBins(max_bins), kernel, all, n, max_bins, skip);
  }
  const int64_t tiles = (n + kTile - 1) / kTile;
  int32_t* counts = static_cast<int32_t*>(workspace);
  const int32_t* order = nullptr;
  for (int k = 0; k < num_passes; ++k) {
    const int64_t shared = SharedForBins(passes[k].bins);
    JAX_TT_RETURN_IF_ERROR(
        Launch(stream, tiles, kThreads, shared, CountTiles, passes[k], order, n, tiles, counts, skip));
    JAX_TT_RETURN_IF_ERROR(
        Launch(stream, 1, kThreads, SharedForBins(1), ScanCounts, counts, passes[k].bins * tiles, skip));
    JAX_TT_RETURN_IF_ERROR(Launch(stream, tiles, kThreads, shared, ScatterTiles, passes[k], order, n, tiles,
                                  static_cast<const int32_t*>(counts), orders[k], skip));
    order = orders[k];
  }
  return {};
}

}  // namespace jax_tt
