// The plan in several launches: positions are sorted digit by digit, the least significant core first and the main
// pivot last; the orders on the way are the lists of the other cores.
#include <algorithm>

#include "ffi/core/sentinel.h"
#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/sort/sort.h"
#include "ffi/cuda/tt_plan/build.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;
// One block numbers the rows of so many positions.
constexpr int kRowThreads = 1024;
constexpr int64_t kRowTile = 2048;

// Passes that sort by a digit in [0, p], p standing for positions that contribute nothing.
int DigitPasses(int64_t p) {
  int passes = 1;
  for (; p >= kMaxBins; p >>= 10) ++passes;
  return passes;
}

struct PassesArgs {
  BuildArgs build;
  int32_t* digits;                 // [d, n] of every position
  int32_t* tile_rows;              // rows that start in each tile
  int32_t* rows;                   // of all tiles
  int32_t* segment[kMaxCores];     // [p + 1] first entry of each slice: in its list, or among the rows
  int32_t* first_part[kMaxCores];  // [p + 1] first part of each slice

  PassesArgs(const BuildArgs& build, Workspace& workspace) : build(build) {
    const CudaPlan& layout = build.layout;
    digits = workspace.Take<int32_t>(layout.d * layout.n);
    tile_rows = workspace.Take<int32_t>((layout.n + kRowTile - 1) / kRowTile);
    rows = workspace.Take<int32_t>(1);
    for (int k = 0; k < kMaxCores; ++k) {
      segment[k] = workspace.Take<int32_t>(k < layout.d ? layout.p[k] + 1 : 0);
      first_part[k] = workspace.Take<int32_t>(k < layout.d ? layout.p[k] + 1 : 0);
    }
  }
};

// Bag and digits of every position, and the checks of the batch.
template <typename Tables>
__global__ void __launch_bounds__(kThreads, 3) ReadBatch(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const PassesArgs& args = tables.Find(&block);
  const BuildArgs& build = args.build;
  if (build.skips()) return;
  const TTShape& shape = build.shape;
  const CudaPlan& layout = build.layout;
  const Lookups& lookups = build.lookups;
  int32_t* plan = build.plan;
  const int64_t i = block.index * kThreads + threadIdx.x;
  if (i < lookups.groups * (lookups.bags + 1) && !OffsetIsSound(lookups, i, i % (lookups.bags + 1) == 0))
    plan[CudaPlan::kBroken] = 1;
  if (i == 0) {
    plan[CudaPlan::kPositions] = static_cast<int32_t>(layout.n);
    if (build.sentinel != nullptr && !SentinelHolds(*build.sentinel)) plan[CudaPlan::kBroken] = 1;
    *args.rows = 0;
  }
  if (build.hash) AddBatchHash(block, lookups, reinterpret_cast<unsigned long long*>(plan + CudaPlan::kHash));
  bool valid = false, poisoned = false;
  if (i < layout.n) {
    const int64_t row = RowAt(build, i);
    valid = row >= 0;
    poisoned = row == kPoisonedRow;
    WriteBag(build, i, row);
    int64_t id = row;
    for (int k = shape.d - 1; k >= 0; --k) {
      const int64_t quotient = id / shape.p[k];
      args.digits[k * layout.n + i] = static_cast<int32_t>(valid ? id - quotient * shape.p[k] : shape.p[k]);
      id = quotient;
    }
  }
  const int valid_here = __syncthreads_count(valid);
  const bool any_poisoned = __syncthreads_or(poisoned);
  if (threadIdx.x != 0) return;
  if (valid_here > 0) atomicAdd(plan + CudaPlan::kValid, valid_here);
  if (any_poisoned) plan[CudaPlan::kBadIds] = 1;
}

// Whether sorted entry i names another row than the one before it.
__device__ bool StartsRow(const CudaPlan& layout, const int32_t* plan, const int32_t* digits, int64_t i) {
  if (i == 0) return true;
  const int32_t* order = plan + layout.order();
  bool same = true;
  for (int k = 0; k < layout.d; ++k) same &= digits[k * layout.n + order[i]] == digits[k * layout.n + order[i - 1]];
  return !same;
}

template <typename Tables>
__global__ void __launch_bounds__(kRowThreads) CountRows(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const PassesArgs& args = tables.Find(&block);
  if (args.build.skips()) return;
  SharedArena arena;
  const Shared<int32_t> sums = arena.Take<int32_t>(kMaxWarps);
  const int64_t first = block.index * kRowTile;
  const int64_t last = min(static_cast<int64_t>(args.build.plan[CudaPlan::kValid]), first + kRowTile);
  int32_t rows = 0, total = 0;
  for (int64_t i = first + threadIdx.x; i < last; i += kRowThreads)
    rows += StartsRow(args.build.layout, args.build.plan, args.digits, i);
  BlockScan(rows, sums, &total);
  if (threadIdx.x == 0) args.tile_rows[block.index] = total;
}

// Numbers the rows in sorted order.  Of tile_rows only what is below its own tile is read.
template <typename Tables>
__global__ void __launch_bounds__(kRowThreads) NumberRows(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const PassesArgs& args = tables.Find(&block);
  if (args.build.skips()) return;
  const CudaPlan& layout = args.build.layout;
  int32_t* plan = args.build.plan;
  const int32_t* __restrict__ digits = args.digits;
  SharedArena arena;
  const Shared<int32_t> sums = arena.Take<int32_t>(kMaxWarps);
  constexpr int kEach = static_cast<int>(kRowTile / kRowThreads);
  const int64_t tile = block.index, valid = plan[CudaPlan::kValid];
  int32_t below = 0, base = 0, total = 0;
  for (int64_t t = threadIdx.x; t < tile; t += kRowThreads) below += args.tile_rows[t];
  BlockScan(below, sums, &base);
  const int64_t first = tile * kRowTile + threadIdx.x * kEach;
  unsigned starts = 0;
  for (int i = 0; i < kEach; ++i)
    starts |= static_cast<unsigned>(first + i < valid && StartsRow(layout, plan, digits, first + i)) << i;
  int32_t row = base + BlockScan(__popc(starts), sums, &total) - 1;
  for (int i = 0; i < kEach && first + i < valid; ++i) {
    const int32_t entry = static_cast<int32_t>(first + i), position = plan[layout.order() + entry];
    if (starts >> i & 1) {
      ++row;
      plan[layout.row_begin() + row] = entry;
      for (int k = 0; k < layout.d; ++k) plan[layout.row_digit(k) + row] = digits[k * layout.n + position];
    }
    plan[layout.row_of() + position] = row;
    plan[layout.row_head() + position] = (starts >> i & 1) != 0 ? row : -1;
    if (entry == valid - 1) {
      *args.rows = row + 1;
      plan[layout.row_begin() + row + 1] = static_cast<int32_t>(valid);
    }
  }
}

// What the entries of a core, in the order of its slices, have of slice numbers.
struct SortedSlices {
  const int32_t *numbers, *list;  // the number of an entry is numbers[list[entry]], or numbers[entry] without a list
  int64_t entries;

  __device__ SortedSlices(const PassesArgs& args, int k) {
    const CudaPlan& layout = args.build.layout;
    const int32_t* plan = args.build.plan;
    const bool of_rows = k == layout.main;
    numbers = of_rows ? plan + layout.row_digit(k) : args.digits + k * layout.n;
    list = of_rows ? nullptr : plan + layout.list(k);
    entries = of_rows ? *args.rows : plan[CudaPlan::kValid];
  }
  __device__ int64_t operator()(int64_t entry) const { return numbers[list == nullptr ? entry : list[entry]]; }
  // The first entry of this slice or a later one.
  __device__ int64_t First(int64_t slice) const {
    int64_t low = 0, high = entries;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if ((*this)(middle) < slice)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

// Whether the slices of a core are cut by the entries that begin them, or, where there are more slices than positions,
// each slice looks for its first entry.
JAX_TT_INLINE bool CutByEntry(const CudaPlan& layout, int k) { return layout.p[k] <= layout.n; }

// First entry of each slice of every core: where its digit first appears, and where no digit does that of the next.
template <typename Tables>
__global__ void __launch_bounds__(kThreads) CutSegments(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const PassesArgs& args = tables.Find(&block);
  if (args.build.skips()) return;
  const CudaPlan& layout = args.build.layout;
  const int64_t i = block.index * kThreads + threadIdx.x;
  const int lane = threadIdx.x % 32;
  for (int k = 0; k < layout.d; ++k) {
    const SortedSlices slices(args, k);
    int32_t* segment = args.segment[k];
    if (!CutByEntry(layout, k)) {
      if (i <= layout.p[k]) segment[i] = static_cast<int32_t>(slices.First(i));
      continue;
    }
    // The entry begins the slices from the one after its predecessor's to its own; the end, those that are left.
    int low = 0, high = -1;
    if (i <= slices.entries) {
      low = i == 0 ? 0 : static_cast<int>(slices(i - 1)) + 1;
      high = static_cast<int>(i == slices.entries ? layout.p[k] : slices(i));
    }
    if (low <= high) segment[low] = static_cast<int32_t>(i);
    // Where there are several, the warp writes the others together.
    for (unsigned gaps = __ballot_sync(kAllLanes, low < high); gaps != 0; gaps &= gaps - 1) {
      const int from = __ffs(static_cast<int>(gaps)) - 1;
      const int first = __shfl_sync(kAllLanes, low, from) + 1, last = __shfl_sync(kAllLanes, high, from);
      for (int slice = first + lane; slice <= last; slice += 32) segment[slice] = static_cast<int32_t>(i - lane + from);
    }
  }
}

// The parts of the slices, one block per core.
template <typename Tables>
__global__ void __launch_bounds__(kRowThreads, 1) CutParts(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const PassesArgs& args = tables.Find(&block);
  if (args.build.skips()) return;
  const CudaPlan& layout = args.build.layout;
  SharedArena arena;
  const Shared<int32_t> sums = arena.Take<int32_t>(kMaxWarps);
  const int k = static_cast<int>(block.index);
  const int64_t part_rows = layout.part_rows[k], slices = layout.p[k];
  const int32_t* segment = args.segment[k];
  int32_t* first_part = args.first_part[k];
  PlanPart* parts = PartsAt(args.build.plan, layout.parts(k));
  for (int64_t slice = threadIdx.x; slice < slices; slice += kRowThreads)
    first_part[slice] = static_cast<int32_t>((segment[slice + 1] - segment[slice] + part_rows - 1) / part_rows);
  if (threadIdx.x == 0) first_part[slices] = 0;
  __syncthreads();
  const int32_t count = ScanArray(first_part, slices + 1, sums);
  for (int64_t slice = threadIdx.x; slice < slices; slice += kRowThreads) {
    const int32_t first = first_part[slice], end = first_part[slice + 1];
    for (int32_t part = first; part < end; ++part) {
      const int32_t begin = segment[slice] + (part - first) * static_cast<int32_t>(part_rows);
      parts[part] = {static_cast<int32_t>(slice), begin,
                     min(begin + static_cast<int32_t>(part_rows), segment[slice + 1]),
                     part == first ? end - first : first - part};
    }
  }
  for (int64_t part = count + threadIdx.x; part < layout.max_parts[k]; part += kRowThreads) parts[part] = kNoPart;
}

constexpr TableKernel kReadBatch =
    TableKernelOf<PassesArgs, ReadBatch<OneTable<PassesArgs>>, ReadBatch<ManyTables<PassesArgs>>, kThreads>::kKernel;
constexpr TableKernel kCountRows =
    TableKernelOf<PassesArgs, CountRows<OneTable<PassesArgs>>, CountRows<ManyTables<PassesArgs>>, kRowThreads>::kKernel;
constexpr TableKernel kNumberRows = TableKernelOf<PassesArgs, NumberRows<OneTable<PassesArgs>>,
                                                  NumberRows<ManyTables<PassesArgs>>, kRowThreads>::kKernel;
constexpr TableKernel kCutSegments = TableKernelOf<PassesArgs, CutSegments<OneTable<PassesArgs>>,
                                                   CutSegments<ManyTables<PassesArgs>>, kThreads>::kKernel;
constexpr TableKernel kCutParts =
    TableKernelOf<PassesArgs, CutParts<OneTable<PassesArgs>>, CutParts<ManyTables<PassesArgs>>, kRowThreads>::kKernel;

// The sort of all positions by the digits of one core after another, each of which leaves the list of its core.
StableSort SortOf(const PassesArgs& args, Workspace& workspace) {
  const CudaPlan& layout = args.build.layout;
  StableSort sort;
  sort.n = layout.n;
  sort.skip = args.build.skip;
  int cores[kMaxCores];
  SortOrder(args.build.shape, layout.main, cores);
  for (int i = 0; i < layout.d; ++i) {
    const int k = cores[i], passes = DigitPasses(layout.p[k]);
    for (int j = 0; j < passes; ++j) {
      const int64_t top = layout.p[k] >> (10 * j);
      const bool last = j + 1 == passes;
      sort.pass[sort.count++] = {.words = args.digits + k * layout.n,
                                 .order = last ? args.build.plan + layout.list(k) : nullptr,
                                 .bins = static_cast<int>(last ? top + 1 : kMaxBins - 1),
                                 .shift = 10 * j,
                                 .mask = last ? -1 : kMaxBins - 2};
    }
  }
  sort.PlaceZeros(workspace);
  sort.Place(workspace);
  return sort;
}

}  // namespace

void BuildByPasses(TableQueue& queue, const BuildArgs& build, Workspace& workspace) {
  const PassesArgs args(build, workspace);
  const CudaPlan& layout = build.layout;
  const Lookups& lookups = build.lookups;
  const StableSort sort = SortOf(args, workspace);
  queue.Clear(build.plan, CudaPlan::kHeader);
  if (sort.num_zeros > 0) queue.Clear(sort.zeros, sort.num_zeros);
  const int64_t threads = std::max<int64_t>({layout.n, lookups.groups * (lookups.bags + 1), 1});
  queue.Add(kReadBatch, (threads + kThreads - 1) / kThreads, 0, args);

  sort.Enqueue(queue);

  const int64_t tiles = (layout.n + kRowTile - 1) / kRowTile;
  constexpr size_t kShared = kMaxWarps * sizeof(int32_t);
  if (tiles > 1) queue.Add(kCountRows, tiles, kShared, args);
  queue.Add(kNumberRows, tiles, kShared, args);
  int64_t cuts = layout.n + 1;
  for (int k = 0; k < layout.d; ++k)
    if (!CutByEntry(layout, k)) cuts = std::max(cuts, layout.p[k] + 1);
  queue.Add(kCutSegments, (cuts + kThreads - 1) / kThreads, 0, args);
  queue.Add(kCutParts, layout.d, kShared, args);
}

}  // namespace jax_tt
