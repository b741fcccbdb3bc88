#include <algorithm>

#include "ffi/core/sentinel.h"
#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/cuda_status.h"
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

__device__ __forceinline__ uint64_t Mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdu;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53u;
  return x ^ x >> 33;
}

// Adds a hash of the words, each with its place, to *hash: the order of the additions does not matter.
__device__ void AddHash(const void* memory, int64_t words, uint64_t salt, unsigned long long* hash) {
  const uint32_t* word = static_cast<const uint32_t*>(memory);
  unsigned long long sum = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < words;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    sum += Mix(word[i] + (salt + static_cast<uint64_t>(i)) * 0x9e3779b97f4a7c15u);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(hash, sum);
}

__device__ void AddBatchHash(const Lookups& lookups, unsigned long long* hash) {
  const int64_t offsets = lookups.groups * (lookups.bags + 1);
  AddHash(lookups.offsets, offsets, 0, hash);
  AddHash(lookups.ids, lookups.size() * lookups.words_per_id, static_cast<uint64_t>(offsets), hash);
}

__global__ void __launch_bounds__(kThreads)
    HashBatch(const __grid_constant__ Lookups lookups, unsigned long long* hash) {
  AddBatchHash(lookups, hash);
}

__global__ void ComparePlan(const int32_t* plan, int64_t n, const unsigned long long* hash, int32_t* is_given) {
  *is_given =
      plan[CudaPlan::kPositions] == n && *reinterpret_cast<const unsigned long long*>(plan + CudaPlan::kHash) == *hash;
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
__global__ void __launch_bounds__(kThreads)
    ReadBatch(const __grid_constant__ TTShape shape, const __grid_constant__ CudaPlan layout,
              const __grid_constant__ Lookups lookups, const float* sentinel, bool hash, int32_t* plan, int32_t* digits,
              const int32_t* skip) {
  if (skip != nullptr && *skip) return;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i < lookups.groups * (lookups.bags + 1)) CheckOffset(lookups, i, plan);
  if (i == 0) {
    plan[CudaPlan::kPositions] = static_cast<int32_t>(layout.n);
    if (sentinel != nullptr && !SentinelHolds(*sentinel)) plan[CudaPlan::kBroken] = 1;
  }
  if (hash) AddBatchHash(lookups, reinterpret_cast<unsigned long long*>(plan + CudaPlan::kHash));
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
      digits[k * layout.n + i] = static_cast<int32_t>(valid ? id - quotient * shape.p[k] : shape.p[k]);
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

__global__ void __launch_bounds__(kRowThreads)
    CountRows(const __grid_constant__ CudaPlan layout, const int32_t* plan, const int32_t* digits, int32_t* tile_rows,
              const int32_t* skip) {
  if (skip != nullptr && *skip) return;
  SharedArena arena;
  const Shared<int32_t> sums = arena.Take<int32_t>(kMaxWarps);
  const int64_t first = blockIdx.x * kRowTile;
  const int64_t last = min(static_cast<int64_t>(plan[CudaPlan::kValid]), first + kRowTile);
  int32_t rows = 0, total = 0;
  for (int64_t i = first + threadIdx.x; i < last; i += kRowThreads) rows += StartsRow(layout, plan, digits, i);
  BlockScan(rows, sums, &total);
  if (threadIdx.x == 0) tile_rows[blockIdx.x] = total;
}

// Numbers the rows in sorted order.  tile_rows: rows that start in each tile, read below this one only.
__global__ void __launch_bounds__(kRowThreads)
    NumberRows(const __grid_constant__ CudaPlan layout, int32_t* plan, const int32_t* __restrict__ digits,
               const int32_t* tile_rows, const int32_t* skip) {
  if (skip != nullptr && *skip) return;
  SharedArena arena;
  const Shared<int32_t> sums = arena.Take<int32_t>(kMaxWarps);
  constexpr int kEach = static_cast<int>(kRowTile / kRowThreads);
  const int64_t tile = blockIdx.x, valid = plan[CudaPlan::kValid];
  int32_t below = 0, base = 0, total = 0;
  for (int64_t t = threadIdx.x; t < tile; t += kRowThreads) below += tile_rows[t];
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
__global__ void __launch_bounds__(kThreads)
    CutSegments(const __grid_constant__ CudaPlan layout, int32_t* plan, const int32_t* digits, const int32_t* skip) {
  if (skip != nullptr && *skip) return;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int lane = threadIdx.x % 32;
  for (int k = 0; k < layout.d; ++k) {
    const SortedSlices slices(layout, plan, digits, k);
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
__global__ void __launch_bounds__(kRowThreads)
    CutParts(const __grid_constant__ CudaPlan layout, int32_t* plan, const int32_t* skip) {
  if (skip != nullptr && *skip) return;
  SharedArena arena;
  const Shared<int32_t> sums = arena.Take<int32_t>(kMaxWarps);
  const int k = blockIdx.x;
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

Status Build(cudaStream_t stream, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
             const float* sentinel, bool hash, int32_t* plan, const Scratch& scratch, const int32_t* skip) {
  JAX_TT_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(plan, 0, CudaPlan::kHeader * sizeof(int32_t), stream)));
  const int64_t threads = std::max<int64_t>({layout.n, lookups.groups * (lookups.bags + 1), 1});
  JAX_TT_RETURN_IF_ERROR(Launch(stream, (threads + kThreads - 1) / kThreads, kThreads, 0, ReadBatch, shape, layout,
                                lookups, sentinel, hash, plan, scratch.digits, skip));

  int cores[kMaxCores], num_passes = 0;
  SortOrder(shape, layout.main, cores);
  SortPass passes[kMaxSortPasses];
  int32_t* orders[kMaxSortPasses];
  for (int i = 0; i < layout.d; ++i) {
    const int k = cores[i], count = DigitPasses(layout.p[k]);
    for (int j = 0; j < count; ++j, ++num_passes) {
      const int64_t top = layout.p[k] >> (10 * j);
      const bool last = j + 1 == count;
      passes[num_passes] = {scratch.digits + k * layout.n, static_cast<int>(last ? top + 1 : kMaxBins - 1), 10 * j,
                            last ? -1 : kMaxBins - 2};
      orders[num_passes] = last ? plan + layout.list(k) : scratch.order[j % 2];
    }
  }
  JAX_TT_RETURN_IF_ERROR(StableSort(stream, layout.n, passes, num_passes, orders, scratch.sorting, skip));

  const int64_t tiles = (layout.n + kRowTile - 1) / kRowTile;
  constexpr size_t kShared = kMaxWarps * sizeof(int32_t);
  if (tiles > 1) {
    JAX_TT_RETURN_IF_ERROR(Launch(stream, tiles, kRowThreads, kShared, CountRows, layout,
                                  static_cast<const int32_t*>(plan), static_cast<const int32_t*>(scratch.digits),
                                  scratch.tile_rows, skip));
  }
  JAX_TT_RETURN_IF_ERROR(Launch(stream, tiles, kRowThreads, kShared, NumberRows, layout, plan,
                                static_cast<const int32_t*>(scratch.digits),
                                static_cast<const int32_t*>(scratch.tile_rows), skip));
  int64_t cuts = layout.n + 1;
  for (int k = 0; k < layout.d; ++k)
    if (!CutByEntry(layout, k)) cuts = std::max(cuts, layout.p[k] + 1);
  JAX_TT_RETURN_IF_ERROR(Launch(stream, (cuts + kThreads - 1) / kThreads, kThreads, 0, CutSegments, layout, plan,
                                static_cast<const int32_t*>(scratch.digits), skip));
  return Launch(stream, layout.d, kRowThreads, kShared, CutParts, layout, plan, skip);
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

Status BuildPlan(cudaStream_t stream, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
                 const float* sentinel, bool hash, int32_t* plan, void* memory) {
  Workspace workspace(memory);
  return Build(stream, shape, layout, lookups, sentinel, hash, plan, Scratch(layout, workspace), nullptr);
}

int64_t EnsurePlanWorkspace(const CudaPlan& layout) {
  Workspace workspace(nullptr);
  Rebuilt(layout, workspace);
  Scratch(layout, workspace);
  return workspace.bytes();
}

Status EnsurePlan(cudaStream_t stream, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
                  const int32_t* given, void* memory, PlanRef* plan) {
  Workspace workspace(memory);
  const Rebuilt rebuilt(layout, workspace);
  const Scratch scratch(layout, workspace);
  JAX_TT_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(rebuilt.hash, 0, sizeof(uint64_t), stream)));
  const int64_t words = std::max<int64_t>(lookups.size() * lookups.words_per_id, lookups.groups * (lookups.bags + 1));
  const int64_t grid = std::clamp<int64_t>((words + kThreads - 1) / kThreads, 1, 1024);
  JAX_TT_RETURN_IF_ERROR(Launch(stream, grid, kThreads, 0, HashBatch, lookups, rebuilt.hash));
  JAX_TT_RETURN_IF_ERROR(Launch(stream, 1, 1, 0, ComparePlan, given, layout.n,
                                static_cast<const unsigned long long*>(rebuilt.hash), rebuilt.is_given));
  *plan = {given, rebuilt.plan, rebuilt.is_given};
  return Build(stream, shape, layout, lookups, nullptr, /*hash=*/false, rebuilt.plan, scratch, rebuilt.is_given);
}

}  // namespace jax_tt
