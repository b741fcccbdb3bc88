// A pass reads positions with their words in tiles, sorts every tile in shared memory, and writes what a tile has of a
// bin side by side.  Where that is to be, the tiles learn from each other within the launch: a tile says how many it
// has of each bin, and adds up what those before it have said.
#include <algorithm>

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/sort/sort.h"
#include "ffi/cuda/tile_count.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256, kTileItems = 16, kTile = kThreads * kTileItems;
// A batch for which the shared memory of one block is enough, on every GPU, is sorted by one launch, all passes in one
// block.
constexpr int kSingleThreads = 512;
constexpr size_t kMostSingleShared = size_t{99} << 10;
constexpr int64_t kCountBlocks = 528;  // four for each multiprocessor of an H200

// One pass of a batch of many tiles.
struct TilePass {
  SortPass pass;
  int64_t n;
  const int32_t* skip;
  // What it reads: pairs, or positions, or neither, before the first pass.
  const uint64_t* pairs;
  const int32_t* order;
  bool carried;      // whether the pairs have its words
  uint64_t* sorted;  // pairs for the next pass, or null
  SortedCopy copies[kSortedCopies];
  // All zero at the start.
  int32_t* begun;              // tiles
  int32_t* bin_sizes;          // [bins] of the whole batch, which CountBins has set
  unsigned long long* counts;  // [tiles, bins] as TileCount has them
};

struct BatchSort {
  SortPass pass[kMaxSortPasses];
  int32_t* bin_sizes[kMaxSortPasses];
  SortedCopy copies[kSortedCopies];
  int64_t n;
  const int32_t* skip;
  int32_t count, max_bins, all_bins;
};

__device__ __forceinline__ int Digit(const SortPass& pass, int32_t word) { return (word >> pass.shift) & pass.mask; }

// A position and the word that it is sorted by.
struct Pair {
  int32_t position, word;

  static __device__ __forceinline__ Pair Of(uint64_t bits) {
    return {static_cast<int32_t>(bits), static_cast<int32_t>(bits >> 32)};
  }
  __device__ __forceinline__ uint64_t bits() const {
    return static_cast<uint64_t>(static_cast<uint32_t>(word)) << 32 | static_cast<uint32_t>(position);
  }
};

// Sorts the pairs of a block by one digit.  Position: what holds positions in shared memory.
template <int kThreads, int kItems, typename Position>
struct TileSorter {
  static constexpr int kWarps = kThreads / 32;

  Shared<int32_t> counters;  // [kWarps, bins]
  Shared<int32_t> starts;    // [bins] where each bin begins
  Shared<int32_t> sizes;     // [bins]
  Shared<int32_t> words;     // [kThreads * kItems] sorted
  Shared<Position> positions;
  Shared<int32_t> sums;  // of scans

  __device__ __forceinline__ TileSorter(SharedArena& arena, int bins)
      : counters(arena.Take<int32_t>(kWarps * bins)),
        starts(arena.Take<int32_t>(bins)),
        sizes(arena.Take<int32_t>(bins)),
        words(arena.Take<int32_t>(kThreads * kItems)),
        positions(arena.Take<Position>(kThreads * kItems)),
        sums(arena.Take<int32_t>(kMaxWarps)) {}
  static constexpr size_t Bytes(int bins) {
    return SharedBytes<int32_t>(kWarps * bins) + 2 * SharedBytes<int32_t>(bins) +
           SharedBytes<int32_t>(kThreads * kItems) + SharedBytes<Position>(kThreads * kItems) +
           SharedBytes<int32_t>(kMaxWarps);
  }
  __device__ __forceinline__ Pair At(int i) const { return {static_cast<int32_t>(positions[i]), words[i]}; }

  // load(i): pair i of the tile, of which there are `count`.  A warp has adjacent ones, in rounds of 32, so that their
  // order is kept; all are asked for before the first is used.
  template <typename Load>
  __device__ __forceinline__ void Sort(const SortPass& pass, int count, Load load) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, first = static_cast<int>(threadIdx.x) / 32 * (32 * kItems);
    const Shared<int32_t> own = counters + static_cast<int>(threadIdx.x) / 32 * pass.bins;
    for (int i = threadIdx.x; i < kWarps * pass.bins; i += kThreads) counters[i] = 0;
    Pair item[kItems];
    load(first + lane, item);
    __syncthreads();
    unsigned ranks[kItems / 2] = {};  // two in a word, among those of the warp with the same digit
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const bool exists = first + lane + 32 * k < count;
      const int digit = exists ? Digit(pass, item[k].word) : -1;  // one that no pair has
      const unsigned peers = __match_any_sync(kAllLanes, digit);
      const int below = __popc(peers & ((1u << lane) - 1));
      int32_t before = 0;
      if (exists) before = own[digit];
      ranks[k / 2] |= static_cast<unsigned>(before + below) << 16 * (k % 2);
      __syncwarp();
      if (exists && below == 0) own[digit] = before + __popc(peers);
      __syncwarp();
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < pass.bins; bin += kThreads) {
      int32_t size = 0;
      for (int warp = 0; warp < kWarps; ++warp) {
        const int32_t of_warp = counters[warp * pass.bins + bin];
        counters[warp * pass.bins + bin] = size;
        size += of_warp;
      }
      starts[bin] = sizes[bin] = size;
    }
    __syncthreads();
    ScanArray(starts, pass.bins, sums);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (first + lane + 32 * k >= count) continue;
      const int digit = Digit(pass, item[k].word);
      const int32_t place = starts[digit] + own[digit] + static_cast<int32_t>(ranks[k / 2] >> 16 * (k % 2) & 0xffff);
      words[place] = item[k].word;
      positions[place] = static_cast<Position>(item[k].position);
    }
    __syncthreads();
  }
};

__device__ __forceinline__ void WriteCopies(const SortedCopy* copies, const SortPass& pass, int64_t i, Pair pair) {
#pragma unroll
  for (int k = 0; k < kSortedCopies; ++k)
    if (copies[k].to != nullptr)
      copies[k].to[i] = copies[k].from == pass.words ? pair.word : copies[k].from[pair.position];
}

template <int kItems>
using SingleSorter = TileSorter<kSingleThreads, kItems, uint16_t>;

template <int kItems, typename Tables>
__global__ void __launch_bounds__(kSingleThreads, 1) SortInOneBlock(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const BatchSort& own = tables.FindInPlace(&block);
  if (own.skip != nullptr && *own.skip) return;
  SharedArena arena;
  const SingleSorter<kItems> sorter(arena, own.max_bins);
  const int n = static_cast<int>(own.n);
  for (int k = 0; k < own.count; ++k) {
    const SortPass& pass = own.pass[k];
    const bool carried = k > 0 && own.pass[k - 1].words == pass.words;
    sorter.Sort(pass, n, [&](int first, Pair(&item)[kItems]) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int i = min(first + 32 * j, n - 1);
        item[j] = {i, 0};
        if (k > 0) item[j] = sorter.At(i);
      }
      if (carried) return;
#pragma unroll
      for (int j = 0; j < kItems; ++j) item[j].word = pass.words[item[j].position];
    });
    if (pass.order == nullptr) continue;
    for (int i = threadIdx.x; i < n; i += kSingleThreads) pass.order[i] = sorter.At(i).position;
  }
  for (int i = threadIdx.x; i < n; i += kSingleThreads)
    WriteCopies(own.copies, own.pass[own.count - 1], i, sorter.At(i));
}

// The sizes of the bins of all passes.
template <typename Tables>
__global__ void __launch_bounds__(kThreads) CountBins(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const BatchSort& own = tables.FindInPlace(&block);
  if (own.skip != nullptr && *own.skip) return;
  SharedArena arena;
  const Shared<int32_t> sizes = arena.Take<int32_t>(own.all_bins);
  for (int i = threadIdx.x; i < own.all_bins; i += kThreads) sizes[i] = 0;
  __syncthreads();
  // Words that a thread asks for before it counts the first of them.
  constexpr int kAhead = 4;
  const int64_t step = block.count * kThreads;
  for (int64_t i = block.index * kThreads + threadIdx.x; i < own.n; i += kAhead * step) {
    const int32_t* words = nullptr;
    int32_t word[kAhead];
    int bins = 0;
    for (int k = 0; k < own.count; ++k) {
      const SortPass& pass = own.pass[k];
      if (pass.words != words)
        for (int j = 0; j < kAhead; ++j) word[j] = pass.words[min(i + j * step, own.n - 1)];
      words = pass.words;
      for (int j = 0; j < kAhead; ++j)
        if (i + j * step < own.n) atomicAdd(sizes + (bins + Digit(pass, word[j])), 1);
      bins += pass.bins;
    }
  }
  __syncthreads();
  int first = 0;
  for (int k = 0; k < own.count; first += own.pass[k++].bins)
    for (int bin = threadIdx.x; bin < own.pass[k].bins; bin += kThreads) {
      const int32_t size = sizes[first + bin];
      if (size != 0) atomicAdd(own.bin_sizes[k] + bin, size);
    }
}

using TilesSorter = TileSorter<kThreads, kTileItems, int32_t>;

template <typename Tables>
__global__ void __launch_bounds__(kThreads, 2) SortTiles(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const TilePass& own = tables.FindInPlace(&block);
  if (own.skip != nullptr && *own.skip) return;
  const SortPass& pass = own.pass;
  SharedArena arena;
  const TilesSorter sorter(arena, pass.bins);
  const Shared<int32_t> places = arena.Take<int32_t>(pass.bins);
  const Shared<int32_t> begun = arena.Take<int32_t>(1);
  if (threadIdx.x == 0) begun[0] = atomicAdd(own.begun, 1);
  for (int bin = threadIdx.x; bin < pass.bins; bin += kThreads) places[bin] = own.bin_sizes[bin];
  __syncthreads();
  const int64_t tile = begun[0], first = tile * kTile;
  const int count = static_cast<int>(min(own.n - first, int64_t{kTile}));
  sorter.Sort(pass, count, [&](int begin, Pair(&item)[kTileItems]) {
#pragma unroll
    for (int k = 0; k < kTileItems; ++k) {
      const int64_t i = first + min(begin + 32 * k, count - 1);
      item[k] = own.pairs != nullptr ? Pair::Of(own.pairs[i])
                                     : Pair{own.order == nullptr ? static_cast<int32_t>(i) : own.order[i], 0};
    }
    if (own.carried) return;
#pragma unroll
    for (int k = 0; k < kTileItems; ++k) item[k].word = pass.words[item[k].position];
  });
  volatile unsigned long long* counts = own.counts;
  for (int bin = threadIdx.x; bin < pass.bins; bin += kThreads)
    counts[tile * pass.bins + bin] = static_cast<unsigned>(sorter.sizes[bin]) | TileCount::kOwn;
  ScanArray(places, pass.bins, sorter.sums);
  for (int bin = threadIdx.x; bin < pass.bins; bin += kThreads) {
    const int32_t before = TileCount::Before(counts + bin, tile, pass.bins);
    counts[tile * pass.bins + bin] = static_cast<unsigned>(before + sorter.sizes[bin]) | TileCount::kAll;
    // From the place of a pair in the tile to its place in the batch.
    places[bin] += before - sorter.starts[bin];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const Pair pair = sorter.At(i);
    const int64_t to = places[Digit(pass, pair.word)] + i;
    if (own.sorted != nullptr) own.sorted[to] = pair.bits();
    if (pass.order != nullptr) pass.order[to] = pair.position;
    WriteCopies(own.copies, pass, to, pair);
  }
}

template <int kItems>
constexpr TableKernel kSortInOneBlock =
    TableKernelOf<BatchSort, SortInOneBlock<kItems, OneTable<BatchSort>>, SortInOneBlock<kItems, ManyTables<BatchSort>>,
                  kSingleThreads>::kKernel;
constexpr TableKernel kCountBins =
    TableKernelOf<BatchSort, CountBins<OneTable<BatchSort>>, CountBins<ManyTables<BatchSort>>, kThreads>::kKernel;
constexpr TableKernel kSortTiles =
    TableKernelOf<TilePass, SortTiles<OneTable<TilePass>>, SortTiles<ManyTables<TilePass>>, kThreads>::kKernel;

// How many pairs a thread has where one block sorts all; 0 where there are too many.  More would not fit into
// registers, and as many as those of a sort that is alone only where its arguments are parameters.
int SingleItems(int64_t n, int max_bins, bool alone) {
  if (n <= 8 * kSingleThreads) return SingleSorter<8>::Bytes(max_bins) <= kMostSingleShared ? 8 : 0;
  if (n <= 16 * kSingleThreads) return SingleSorter<16>::Bytes(max_bins) <= kMostSingleShared ? 16 : 0;
  if (alone && n <= 24 * kSingleThreads) return SingleSorter<24>::Bytes(max_bins) <= kMostSingleShared ? 24 : 0;
  return 0;
}

int64_t TilesOf(int64_t n) { return (n + kTile - 1) / kTile; }

// Words of the zeros of a pass, an even number: the counts of tiles take two words each, and come first.
int64_t ZerosOf(const SortPass& pass, int64_t tiles) { return 2 * tiles * pass.bins + (pass.bins + 1 + 1) / 2 * 2; }

BatchSort BatchOf(const StableSort& sort) {
  BatchSort batch{};
  batch.n = sort.n;
  batch.skip = sort.skip;
  batch.count = sort.count;
  batch.max_bins = sort.MaxBins();
  std::copy_n(sort.copies, kSortedCopies, batch.copies);
  for (int k = 0; k < sort.count; ++k) {
    batch.pass[k] = sort.pass[k];
    batch.all_bins += sort.pass[k].bins;
  }
  return batch;
}

}  // namespace

void StableSort::AddPasses(const int32_t* words, int bits) {
  constexpr int kMaxBits = 8;
  const int passes = (bits + kMaxBits - 1) / kMaxBits, each = passes == 0 ? 0 : (bits + passes - 1) / passes;
  for (int k = 0; k < passes; ++k) {
    const int bins = 1 << std::min(each, bits - k * each);
    pass[count++] = {.words = words, .bins = bins, .shift = k * each, .mask = bins - 1};
  }
}

int StableSort::MaxBins() const {
  int bins = 1;
  for (int k = 0; k < count; ++k) bins = std::max(bins, pass[k].bins);
  return bins;
}

bool StableSort::InOneLaunch() const { return SingleItems(n, MaxBins(), alone) > 0; }

void StableSort::PlaceZeros(Workspace& workspace) {
  num_zeros = 0;
  if (!InOneLaunch())
    for (int k = 0; k < count; ++k) num_zeros += ZerosOf(pass[k], TilesOf(n));
  zeros = workspace.Take<int32_t>(num_zeros);
}

void StableSort::Place(Workspace& workspace) {
  for (uint64_t*& pairs : pairs_) pairs = workspace.Take<uint64_t>(InOneLaunch() ? 0 : n);
}

void StableSort::Enqueue(TableQueue& queue) const {
  if (n == 0) return;
  BatchSort sort = BatchOf(*this);
  switch (SingleItems(n, sort.max_bins, /*alone=*/false)) {
    case 8:
      return queue.Add(kSortInOneBlock<8>, 1, SingleSorter<8>::Bytes(sort.max_bins), sort);
    case 16:
      return queue.Add(kSortInOneBlock<16>, 1, SingleSorter<16>::Bytes(sort.max_bins), sort);
    default:
      break;
  }
  const int64_t tiles = TilesOf(n);
  TilePass passes[kMaxSortPasses] = {};
  int32_t* zero = zeros;
  for (int k = 0; k < count; ++k) {
    TilePass& own = passes[k];
    own.pass = pass[k];
    own.n = n;
    own.skip = skip;
    own.counts = reinterpret_cast<unsigned long long*>(zero);
    own.bin_sizes = sort.bin_sizes[k] = zero + 2 * tiles * pass[k].bins;
    own.begun = own.bin_sizes + pass[k].bins;
    zero += ZerosOf(pass[k], tiles);
    if (k == 0) continue;
    own.carried = pass[k - 1].words == pass[k].words;
    own.order = pass[k - 1].order;
    // A pass by other words reads them by position, for which the order is enough.
    if (own.carried || own.order == nullptr) own.pairs = passes[k - 1].sorted = pairs_[k % 2];
  }
  std::copy_n(copies, kSortedCopies, passes[count - 1].copies);
  queue.Add(kCountBins, std::min(tiles, kCountBlocks), SharedBytes<int32_t>(sort.all_bins), sort);
  for (int k = 0; k < count; ++k)
    queue.Add(kSortTiles, tiles,
              TilesSorter::Bytes(pass[k].bins) + SharedBytes<int32_t>(pass[k].bins) + SharedBytes<int32_t>(1),
              passes[k]);
}

Status StableSort::Run(cudaStream_t stream) const {
  const BatchSort sort = BatchOf(*this);
  if (SingleItems(n, sort.max_bins, alone) == 24) {
    using Alone = TableKernelOf<BatchSort, SortInOneBlock<24, OneTable<BatchSort>>, nullptr, kSingleThreads>;
    return LaunchStatus(Alone::One(stream, 1, SingleSorter<24>::Bytes(sort.max_bins), &sort));
  }
  TableQueue queue;
  Enqueue(queue);
  return queue.Run(stream);
}

}  // namespace jax_tt
