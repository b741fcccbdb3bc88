#include <algorithm>

#include "ffi/core/sentinel.h"
#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/ids.h"
#include "ffi/cuda/plan.h"
#include "ffi/cuda/sort.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;
// One block numbers the rows of so many positions.
constexpr int kRowThreads = 1024;
constexpr int64_t kRowTile = 2048;

// Which side of the main pivot is contracted with it first decides which rows should be adjacent.
void SortOrder(const TTShape& shape, int main, int* cores) {
  const bool left_first = MakePivot(shape, main).left_first;
  int count = 0;
  for (int side = 0; side < 2; ++side)
    for (int k = 0; k < shape.d; ++k)
      if (k != main && (k < main) == (left_first == (side == 1))) cores[count++] = k;
  cores[count] = main;
}

// Passes that sort by a digit in [0, p], p standing for positions that contribute nothing.
int DigitPasses(int64_t p) {
  int passes = 1;
  for (; p >= kMaxBins; p >>= 10) ++passes;
  return passes;
}

// What building takes beside the plan.
struct Scratch {
  int32_t* digits;    // [d, n] of every position
  int32_t* order[2];  // [n] between the passes of one core
  int32_t* tile_rows;
  void* sorting;

  Scratch(const CudaPlan& layout, Workspace& workspace) {
    digits = workspace.Take<int32_t>(layout.d * layout.n);
    for (int32_t*& buffer : order) buffer = workspace.Take<int32_t>(layout.n);
    tile_rows = workspace.Take<int32_t>((layout.n + kRowTile - 1) / kRowTile);
    sorting = workspace.Take<char>(SortWorkspace(layout.n, kMaxBins));
  }
};

// What making a plan again takes.
struct Rebuilt {
  unsigned long long* hash;
  int32_t *is_given, *plan;

  Rebuilt(const CudaPlan& layout, Workspace& workspace)
      : hash(workspace.Take<unsigned long long>(1)),
        is_given(workspace.Take<int32_t>(1)),
        plan(workspace.Take<int32_t>(layout.size())) {}
};

// What the kernels that build a plan are given.
struct BuildArgs {
  TTShape shape;
  CudaPlan layout;
  Lookups lookups;
  const float* sentinel;
  int32_t* plan;
  int32_t* digits;     // [d, n] of every position
  int32_t* tile_rows;  // rows that start in each tile
  const int32_t* skip;
  bool hash;

  // Whether the plan is there already.
  __device__ bool skips() const { return skip != nullptr && *skip != 0; }
};

// What the kernels are given that tell whether a plan is this batch's.
struct CompareArgs {
  Lookups lookups;
  const int32_t* plan;
  int64_t n;
  unsigned long long* hash;
  int32_t* is_given;
};

__device__ __forceinline__ uint64_t Mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdu;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53u;
  return x ^ x >> 33;
}

// Adds a hash of the words, each with its place, to *hash: the order of the additions does not matter.
__device__ void AddHash(const BlockOfTable& block, const void* memory, int64_t words, uint64_t salt,
                        unsigned long long* hash) {
  const uint32_t* word = static_cast<const uint32_t*>(memory);
  unsigned long long sum = 0;
  for (int64_t i = block.index * kThreads + threadIdx.x; i < words; i += block.count * kThreads)
    sum += Mix(word[i] + (salt + static_cast<uint64_t>(i)) * 0x9e3779b97f4a7c15u);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(hash, sum);
}

__device__ void AddBatchHash(const BlockOfTable& block, const Lookups& lookups, unsigned long long* hash) {
  const int64_t offsets = lookups.groups * (lookups.bags + 1);
  AddHash(block, lookups.offsets, offsets, 0, hash);
  AddHash(block, lookups.ids, lookups.size() * lookups.words_per_id, static_cast<uint64_t>(offsets), hash);
}

template <typename Tables>
__global__ void __launch_bounds__(kThreads) HashBatch(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const CompareArgs& args = tables.Find(&block);
  AddBatchHash(block, args.lookups, args.hash);
}

template <typename Tables>
__global__ void __launch_bounds__(32) ComparePlan(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const CompareArgs& args = tables.Find(&block);
  if (threadIdx.x != 0) return;
  *args.is_given = args.plan[CudaPlan::kPositions] == args.n &&
                   *reinterpret_cast<const unsigned long long*>(args.plan + CudaPlan::kHash) == *args.hash;
}

__device__ int64_t ReadRow(const Lookups& lookups, const TTShape& shape, int64_t position) {
  if (lookups.type != IdType::kDigits)
    return ResolveWholeId(lookups.type, lookups.ids, position, lookups.padded, lookups.bounds, shape.num_embeddings);
  const int64_t id = JoinDigits(shape, static_cast<const int32_t*>(lookups.ids) + position * shape.d);
  return ResolveId(id, lookups.padded, lookups.bounds, shape.num_embeddings);
}

__device__ void NoteId(const Lookups& lookups, const TTShape& shape, int64_t position) {
  const int64_t id = lookups.type == IdType::kDigits
                         ? JoinDigits(shape, static_cast<const int32_t*>(lookups.ids) + position * shape.d)
                         : WrittenWholeId(lookups.type, lookups.ids, position, lookups.padded);
  LeaveNotice(lookups.notice, id, position);
}

__device__ void CheckOffset(const Lookups& lookups, int64_t i, int32_t* header) {
  const int64_t within = i % (lookups.bags + 1);
  const int32_t offset = lookups.offsets[i];
  const bool sound = (within == 0 ? offset == 0 : offset >= lookups.offsets[i - 1]) && offset <= lookups.capacity;
  if (!sound) header[CudaPlan::kBroken] = 1;
}

// Bag and digits of every position, and the checks of the batch.
template <typename Tables>
__global__ void __launch_bounds__(kThreads) ReadBatch(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const BuildArgs& args = tables.Find(&block);
  if (args.skips()) return;
  const TTShape& shape = args.shape;
  const CudaPlan& layout = args.layout;
  const Lookups& lookups = args.lookups;
  int32_t* plan = args.plan;
  const int64_t i = block.index * kThreads + threadIdx.x;
  if (i < lookups.groups * (lookups.bags + 1)) CheckOffset(lookups, i, plan);
  if (i == 0) {
    plan[CudaPlan::kPositions] = static_cast<int32_t>(layout.n);
    if (args.sentinel != nullptr && !SentinelHolds(*args.sentinel)) plan[CudaPlan::kBroken] = 1;
  }
  if (args.hash) AddBatchHash(block, lookups, reinterpret_cast<unsigned long long*>(plan + CudaPlan::kHash));
  bool valid = false, poisoned = false;
  if (i < layout.n) {
    const int64_t group = i / lookups.capacity;
    const int32_t bag =
        FindBag(lookups.offsets + group * (lookups.bags + 1), lookups.bags, i - group * lookups.capacity);
    const int64_t row = bag < 0 ? kNoRow : ReadRow(lookups, shape, i);
    valid = row >= 0;
    poisoned = row == kPoisonedRow;
    if (row == kNoticedRow) NoteId(lookups, shape, i);
    plan[layout.bag() + i] = valid      ? static_cast<int32_t>(group * lookups.bags + bag)
                             : poisoned ? CudaPlan::kPoisoned
                                        : -1;
    plan[layout.row_of() + i] = -1;
    plan[layout.row_head() + i] = -1;
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
  const BuildArgs& args = tables.Find(&block);
  if (args.skips()) return;
  SharedArena arena;
  const Shared<int32_t> sums = arena.Take<int32_t>(kMaxWarps);
  const int64_t first = block.index * kRowTile;
  const int64_t last = min(static_cast<int64_t>(args.plan[CudaPlan::kValid]), first + kRowTile);
  int32_t rows = 0, total = 0;
  for (int64_t i = first + threadIdx.x; i < last; i += kRowThreads)
    rows += StartsRow(args.layout, args.plan, args.digits, i);
  BlockScan(rows, sums, &total);
  if (threadIdx.x == 0) args.tile_rows[block.index] = total;
}

// Numbers the rows in sorted order.  Of tile_rows only what is below its own tile is read.
template <typename Tables>
__global__ void __launch_bounds__(kRowThreads) NumberRows(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const BuildArgs& args = tables.Find(&block);
  if (args.skips()) return;
  const CudaPlan& layout = args.layout;
  int32_t* plan = args.plan;
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
      plan[layout.row_head() + position] = row;
      plan[layout.row_begin() + row] = entry;
      for (int k = 0; k < layout.d; ++k) plan[layout.row_digit(k) + row] = digits[k * layout.n + position];
    }
    plan[layout.row_of() + position] = row;
    if (entry == valid - 1) {
      plan[CudaPlan::kRows] = row + 1;
      plan[layout.row_begin() + row + 1] = static_cast<int32_t>(valid);
    }
  }
}

// What the entries of a core, in the order of its slices, have of slice numbers.
struct SortedSlices {
  const int32_t *numbers, *list;  // the number of an entry is numbers[list[entry]], or numbers[entry] without a list
  int64_t entries;

  __device__ SortedSlices(const CudaPlan& layout, const int32_t* plan, const int32_t* digits, int k)
      : numbers(k == layout.main ? plan + layout.row_digit(k) : digits + k * layout.n),
        list(k == layout.main ? nullptr : plan + layout.list(k)),
        entries(plan[k == layout.main ? CudaPlan::kRows : CudaPlan::kValid]) {}
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
  const BuildArgs& args = tables.Find(&block);
  if (args.skips()) return;
  const CudaPlan& layout = args.layout;
  int32_t* plan = args.plan;
  const int64_t i = block.index * kThreads + threadIdx.x;
  const int lane = threadIdx.x % 32;
  for (int k = 0; k < layout.d; ++k) {
    const SortedSlices slices(layout, plan, args.digits, k);
    int32_t* segment = plan + layout.segment(k);
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
__global__ void __launch_bounds__(kRowThreads) CutParts(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const BuildArgs& args = tables.Find(&block);
  if (args.skips()) return;
  const CudaPlan& layout = args.layout;
  int32_t* plan = args.plan;
  SharedArena arena;
  const Shared<int32_t> sums = arena.Take<int32_t>(kMaxWarps);
  const int k = static_cast<int>(block.index);
  const int64_t part_rows = layout.part_rows[k], slices = layout.p[k];
  const int32_t* segment = plan + layout.segment(k);
  int32_t* first_part = plan + layout.first_part(k);
  int32_t* part_slice = plan + layout.part_slice(k);
  for (int64_t slice = threadIdx.x; slice < slices; slice += kRowThreads)
    first_part[slice] = static_cast<int32_t>((segment[slice + 1] - segment[slice] + part_rows - 1) / part_rows);
  if (threadIdx.x == 0) first_part[slices] = 0;
  __syncthreads();
  const int32_t parts = ScanArray(first_part, slices + 1, sums);
  if (threadIdx.x == 0) plan[CudaPlan::kParts + k] = parts;
  for (int64_t slice = threadIdx.x; slice < slices; slice += kRowThreads)
    for (int32_t part = first_part[slice]; part < first_part[slice + 1]; ++part)
      part_slice[part] = static_cast<int32_t>(slice);
}

constexpr TableKernel kHashBatch =
    TableKernelOf<CompareArgs, HashBatch<OneTable<CompareArgs>>, HashBatch<ManyTables<CompareArgs>>, kThreads>::kKernel;
constexpr TableKernel kComparePlan =
    TableKernelOf<CompareArgs, ComparePlan<OneTable<CompareArgs>>, ComparePlan<ManyTables<CompareArgs>>, 32>::kKernel;
constexpr TableKernel kReadBatch =
    TableKernelOf<BuildArgs, ReadBatch<OneTable<BuildArgs>>, ReadBatch<ManyTables<BuildArgs>>, kThreads>::kKernel;
constexpr TableKernel kCountRows =
    TableKernelOf<BuildArgs, CountRows<OneTable<BuildArgs>>, CountRows<ManyTables<BuildArgs>>, kRowThreads>::kKernel;
constexpr TableKernel kNumberRows =
    TableKernelOf<BuildArgs, NumberRows<OneTable<BuildArgs>>, NumberRows<ManyTables<BuildArgs>>, kRowThreads>::kKernel;
constexpr TableKernel kCutSegments =
    TableKernelOf<BuildArgs, CutSegments<OneTable<BuildArgs>>, CutSegments<ManyTables<BuildArgs>>, kThreads>::kKernel;
constexpr TableKernel kCutParts =
    TableKernelOf<BuildArgs, CutParts<OneTable<BuildArgs>>, CutParts<ManyTables<BuildArgs>>, kRowThreads>::kKernel;

void Build(TableQueue& queue, const BuildArgs& args, const Scratch& scratch) {
  const TTShape& shape = args.shape;
  const CudaPlan& layout = args.layout;
  const Lookups& lookups = args.lookups;
  queue.Clear(args.plan, CudaPlan::kHeader);
  const int64_t threads = std::max<int64_t>({layout.n, lookups.groups * (lookups.bags + 1), 1});
  queue.Add(kReadBatch, (threads + kThreads - 1) / kThreads, 0, args);

  int cores[kMaxCores], num_passes = 0;
  SortOrder(shape, layout.main, cores);
  SortPass passes[kMaxSortPasses];
  int32_t* orders[kMaxSortPasses];
  for (int i = 0; i < layout.d; ++i) {
    const int k = cores[i], count = DigitPasses(layout.p[k]);
    for (int j = 0; j < count; ++j, ++num_passes) {
      const int64_t top = layout.p[k] >> (10 * j);
      const bool last = j + 1 == count;
      passes[num_passes] = {args.digits + k * layout.n, static_cast<int>(last ? top + 1 : kMaxBins - 1), 10 * j,
                            last ? -1 : kMaxBins - 2};
      orders[num_passes] = last ? args.plan + layout.list(k) : scratch.order[j % 2];
    }
  }
  StableSort(queue, layout.n, passes, num_passes, orders, scratch.sorting, args.skip);

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

BuildArgs MakeBuildArgs(const TTShape& shape, const CudaPlan& layout, const Lookups& lookups, int32_t* plan,
                        const Scratch& scratch) {
  BuildArgs args{};
  args.shape = shape;
  args.layout = layout;
  args.lookups = lookups;
  args.plan = plan;
  args.digits = scratch.digits;
  args.tile_rows = scratch.tile_rows;
  return args;
}

}  // namespace

CudaPlan MakeCudaPlan(const TTShape& shape, int64_t n) {
  // Parts are few enough for the gradients of their slices to stay small, and large enough to share a slice.
  constexpr int64_t kPartBytes = int64_t{64} << 20, kMinParts = 128, kMaxParts = 2048;
  // A small batch is cut finer, so that its parts spread evenly over the multiprocessors.
  const int64_t least_rows = n <= 16384 ? 32 : 64;
  CudaPlan layout;
  layout.d = shape.d;
  layout.main = MainPivot(shape);
  layout.n = n;
  std::copy_n(shape.p, shape.d, layout.p);
  // Of the other cores every entry has a short share, which one block adds up quickly.
  constexpr int64_t kListPart = 512;
  for (int k = 0; k < shape.d; ++k) layout.part_rows[k] = kListPart;
  const PivotList pivots = BackwardPivots(shape);
  for (int i = 0; i < pivots.count; ++i) {
    const int k = pivots.core[i];
    const int64_t bytes = shape.slice_size(k) * static_cast<int64_t>(sizeof(float));
    const int64_t parts = std::clamp(kPartBytes / bytes, kMinParts, kMaxParts);
    layout.part_rows[k] = std::max(least_rows, (n + parts - 1) / parts);
  }
  for (int k = 0; k < shape.d; ++k) layout.max_parts[k] = n / layout.part_rows[k] + std::min(shape.p[k], n);
  return layout;
}

int64_t PlanWorkspace(const CudaPlan& layout) {
  Workspace workspace(nullptr);
  Scratch(layout, workspace);
  return workspace.bytes();
}

void BuildPlan(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
               const float* sentinel, bool hash, int32_t* plan, void* memory) {
  Workspace workspace(memory);
  const Scratch scratch(layout, workspace);
  BuildArgs args = MakeBuildArgs(shape, layout, lookups, plan, scratch);
  args.sentinel = sentinel;
  args.hash = hash;
  Build(queue, args, scratch);
}

int64_t EnsurePlanWorkspace(const CudaPlan& layout) {
  Workspace workspace(nullptr);
  Rebuilt(layout, workspace);
  Scratch(layout, workspace);
  return workspace.bytes();
}

PlanRef EnsurePlan(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
                   const int32_t* given, void* memory) {
  Workspace workspace(memory);
  const Rebuilt rebuilt(layout, workspace);
  const Scratch scratch(layout, workspace);
  queue.Clear(rebuilt.hash, sizeof(uint64_t) / sizeof(int32_t));
  const int64_t words = std::max<int64_t>(lookups.size() * lookups.words_per_id, lookups.groups * (lookups.bags + 1));
  const int64_t blocks = std::clamp<int64_t>((words + kThreads - 1) / kThreads, 1, 1024);
  const CompareArgs compare{lookups, given, layout.n, rebuilt.hash, rebuilt.is_given};
  queue.Add(kHashBatch, blocks, 0, compare);
  queue.Add(kComparePlan, 1, 0, compare);
  BuildArgs args = MakeBuildArgs(shape, layout, lookups, rebuilt.plan, scratch);
  args.skip = rebuilt.is_given;
  Build(queue, args, scratch);
  return {given, rebuilt.plan, rebuilt.is_given};
}

}  // namespace jax_tt
