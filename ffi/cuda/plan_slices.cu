// The plan in one launch.  A block owns some slices of one core.  It reads all ids, keeps the positions that have its
// slices, and counts those that have earlier ones, which tells it where its own begin: no block waits for another.
#include <algorithm>

#include "ffi/core/divider.h"
#include "ffi/core/sentinel.h"
#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/merge_exchange.h"
#include "ffi/cuda/plan_build.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 8;  // ids that a thread asks for at once
// A key holds the digits of a position, the most significant highest, and below them the position.
constexpr int kPositionBits = 16;
constexpr int64_t kMostIds = int64_t{1} << kPositionBits;
constexpr int64_t kMostIdsPerSlice = 4096;  // on average, of every core
// Keys in shared memory; a block whose slices have more sorts them in global memory.
constexpr int64_t kMostShared = 8192;
// Blocks of a core at most.  Those of the main pivot have more to do.
constexpr int64_t kMainBlocks = 128, kListBlocks = 64;
constexpr int64_t kIdsPerBlock = 64;  // at least, on average

struct SliceArgs {
  BuildArgs build;
  // By core: what to divide a row by to get at its digit, the digit's place in a key, and the blocks.
  Divider stride[kMaxCores], factor[kMaxCores];
  int shift[kMaxCores], bits[kMaxCores];
  int prefix_shift;  // keys shifted right by this are equal if rows share the slices of the pivot and of the core that
                     // is contracted with it first
  int64_t slices[kMaxCores], blocks[kMaxCores];
  int64_t shared_keys;
  uint64_t* keys;  // [d, n]

  __device__ __forceinline__ int32_t Digit(int core, int64_t row) const {
    const uint64_t quotient = stride[core].Quotient(static_cast<uint64_t>(row));
    return static_cast<int32_t>(quotient - factor[core].Quotient(quotient) * factor[core].divisor());
  }
  __device__ __forceinline__ int32_t DigitOf(int core, uint64_t key) const {
    return static_cast<int32_t>(key >> shift[core] & ((uint64_t{1} << bits[core]) - 1));
  }
};

constexpr uint64_t kPositionMask = (uint64_t{1} << kPositionBits) - 1;
__device__ __forceinline__ int32_t PositionOf(uint64_t key) { return static_cast<int32_t>(key & kPositionMask); }

// The slices of a block, and what the batch has of them.
struct OwnSlices {
  int core;
  int64_t begin, end;  // of the slices
  int32_t first = 0;   // positions with earlier slices
  int32_t count = 0;   // with these
  int32_t valid = 0;   // with any
  __device__ OwnSlices(const SliceArgs& args, int core, int64_t block)
      : core(core), begin(block * args.slices[core]), end(min(begin + args.slices[core], args.build.layout.p[core])) {}
};

// Sets the counts, and puts the positions with these slices into `keys` in any order, as far as they fit.  `words`:
// kMaxWarps + 1.
template <typename Keys>
__device__ void Collect(const SliceArgs& args, OwnSlices& own, Keys keys, int64_t most, Shared<int32_t> words) {
  const int n = static_cast<int>(args.build.layout.n), lane = threadIdx.x % 32;
  const int32_t begin = static_cast<int32_t>(own.begin), end = static_cast<int32_t>(own.end);
  const Shared<int32_t> count = words + kMaxWarps;
  if (threadIdx.x == 0) count[0] = 0;
  __syncthreads();
  int32_t below = 0, valid = 0;
  for (int base = static_cast<int>(threadIdx.x) - lane; base < n; base += kThreads * kAhead) {
    int64_t row[kAhead];
    RowsAt(args.build, base + lane, kThreads, row);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int32_t slice = row[k] < 0 ? end : args.Digit(own.core, row[k]);
      valid += row[k] >= 0;
      below += slice < begin;
      const bool mine = slice >= begin && slice < end;
      const unsigned owners = __ballot_sync(kAllLanes, mine);
      if (owners == 0) continue;
      int32_t place = 0;
      if (lane == 0) place = atomicAdd(count, __popc(owners));
      place = __shfl_sync(kAllLanes, place, 0) + __popc(owners & ((1u << lane) - 1));
      if (mine && place < most) keys[place] = static_cast<uint64_t>(base + k * kThreads + lane);
    }
  }
  BlockScan(below, words, &own.first);
  BlockScan(valid, words, &own.valid);
  own.count = count[0];
  __syncthreads();
}

// Numbers the rows of the main pivot's sorted keys.
template <typename Keys>
__device__ void WriteRows(const SliceArgs& args, const OwnSlices& own, Keys keys, Shared<int32_t> sums) {
  const CudaPlan& layout = args.build.layout;
  int32_t* plan = args.build.plan;
  const auto starts = [&](int i) {
    if (i == 0) return true;
    const uint64_t key = keys[i], before = keys[i - 1];
    return key >> kPositionBits != before >> kPositionBits;
  };
  const int each = (own.count + kThreads - 1) / kThreads;
  const int begin = min(own.count, static_cast<int>(threadIdx.x) * each), end = min(own.count, begin + each);
  int32_t heads = 0, rows = 0;
  for (int i = begin; i < end; ++i) heads += starts(i);
  int32_t row = own.first + BlockScan(heads, sums, &rows) - 1;
  for (int i = begin; i < end; ++i) {
    const uint64_t key = keys[i];
    const int32_t position = PositionOf(key);
    const bool is_head = starts(i);
    if (is_head) {
      ++row;
      plan[layout.row_begin() + row] = own.first + i;
      for (int k = 0; k < layout.d; ++k) plan[layout.row_digit(k) + row] = args.DigitOf(k, key);
    }
    plan[layout.order() + own.first + i] = position;
    plan[layout.row_of() + position] = row;
    plan[layout.row_head() + position] = is_head ? row : -1;
  }
  // Where no number is left out, the next block's first row begins here, and says so.
  const int32_t last = own.first + own.count;
  if (threadIdx.x == 0 && own.count > 0 && (rows < own.count || last == own.valid))
    plan[layout.row_begin() + own.first + rows] = last;
}

// The number of the first part of a slice, before which there are this many entries: enough for all parts of earlier
// ones, and all blocks agree on it.
__device__ __forceinline__ int64_t FirstPart(const CudaPlan& layout, int core, int64_t slice, int64_t entries) {
  return entries / layout.least_rows[core] + min(slice, entries);
}

// Cuts [begin, end) into parts of equal size.  For one thread.
__device__ void CutEvenly(int32_t slice, int32_t begin, int32_t end, int32_t size, PlanPart* to) {
  const int32_t count = (end - begin + size - 1) / size;
  for (int32_t part = 0; part < count; ++part) {
    const int32_t first = begin + part * size;
    to[part] = {slice, first, min(first + size, end), part == 0 ? count : -part};
  }
}

// Cuts the rows of keys [begin, end), the first of which is `row`, after every `part_tiles` full tiles.  For a warp.
template <typename Keys>
__device__ void CutByTiles(const SliceArgs& args, Keys keys, int32_t slice, int begin, int end, int32_t row,
                           PlanPart* to) {
  const CudaPlan& layout = args.build.layout;
  const int lane = threadIdx.x % 32;
  int32_t first = row, count = 0;
  const auto write = [&] {
    if (lane == 0) to[count] = {slice, first, row, -count};
    ++count;
    first = row;
  };
  int rows = 0, prefixes = 0, tiles = 0;  // of the tile, and full ones of the part
  for (int at = begin; at < end;) {
    const int i = at + lane;
    const bool inside = i < end;
    uint64_t key = 0, before = 0;
    if (inside) key = keys[i];
    if (inside && i > begin) before = keys[i - 1];
    const bool starts = inside && (i == begin || key >> kPositionBits != before >> kPositionBits);
    // The first row of a tile has a prefix whatever the row before it has.
    const bool starts_prefix =
        starts && (rows + lane == 0 || i == begin || key >> args.prefix_shift != before >> args.prefix_shift);
    const unsigned heads = __ballot_sync(kAllLanes, starts), prefix_heads = __ballot_sync(kAllLanes, starts_prefix);
    const unsigned up_to = 0xffffffffu >> (31 - lane);
    const bool beyond = starts && (rows + __popc(heads & up_to) > layout.tile_rows ||
                                   prefixes + __popc(prefix_heads & up_to) > layout.tile_prefixes);
    const unsigned after = __ballot_sync(kAllLanes, beyond);
    const int taken = after == 0 ? min(32, end - at) : __ffs(static_cast<int>(after)) - 1;
    const unsigned own = taken == 32 ? kAllLanes : (1u << taken) - 1;
    row += __popc(heads & own);
    rows += __popc(heads & own);
    prefixes += __popc(prefix_heads & own);
    at += taken;
    if (after == 0) continue;
    rows = prefixes = 0;
    if (++tiles < layout.part_tiles) continue;
    tiles = 0;
    write();
  }
  write();
  if (lane == 0) to[0].count = count;
}

template <typename Keys>
__device__ void WriteParts(const SliceArgs& args, const OwnSlices& own, Keys keys) {
  const CudaPlan& layout = args.build.layout;
  const int32_t* plan = args.build.plan;
  const int core = own.core;
  PlanPart* parts = PartsAt(args.build.plan, layout.parts(core));
  const int64_t last =
      own.end == layout.p[core] ? layout.max_parts[core] : FirstPart(layout, core, own.end, own.first + own.count);
  for (int64_t i = FirstPart(layout, core, own.begin, own.first) + threadIdx.x; i < last; i += kThreads)
    parts[i] = kNoPart;
  __syncthreads();
  const auto slice_at = [&](int i) { return args.DigitOf(core, keys[i]); };
  const auto starts_at = [&](int i) { return i < own.count && (i == 0 || slice_at(i - 1) != slice_at(i)); };
  // Of the keys of the slice that begins here.
  const auto end_at = [&](int i) {
    const int32_t slice = slice_at(i);
    int end = i + 1;
    for (int high = own.count; end < high;) {
      const int middle = (end + high) / 2;
      if (slice_at(middle) == slice)
        end = middle + 1;
      else
        high = middle;
    }
    return end;
  };
  const auto parts_at = [&](int i) { return parts + FirstPart(layout, core, slice_at(i), own.first + i); };
  if (core != layout.main) {
    for (int i = threadIdx.x; i < own.count; i += kThreads)
      if (starts_at(i))
        CutEvenly(slice_at(i), own.first + i, own.first + end_at(i), static_cast<int32_t>(layout.part_rows[core]),
                  parts_at(i));
    return;
  }
  for (int base = static_cast<int>(threadIdx.x) / 32 * 32; base < own.count; base += kThreads) {
    unsigned starts = __ballot_sync(kAllLanes, starts_at(base + static_cast<int>(threadIdx.x) % 32));
    for (; starts != 0; starts &= starts - 1) {
      const int i = base + __ffs(static_cast<int>(starts)) - 1;
      CutByTiles(args, keys, slice_at(i), i, end_at(i), plan[layout.row_of() + PositionOf(keys[i])], parts_at(i));
    }
  }
}

// From the positions in `keys` to the plan.
template <typename Keys>
__device__ void Arrange(const SliceArgs& args, const OwnSlices& own, Keys keys, Shared<int32_t> sums) {
  const CudaPlan& layout = args.build.layout;
  const bool of_rows = own.core == layout.main;
  for (int i = threadIdx.x; i < own.count; i += kThreads) {
    const uint64_t position = keys[i];
    const int64_t row = RowAt(args.build, static_cast<int64_t>(position));
    uint64_t key = position;
    for (int k = 0; k < layout.d; ++k)
      if (of_rows || k == own.core) key |= static_cast<uint64_t>(args.Digit(k, row)) << args.shift[k];
    keys[i] = key;
  }
  __syncthreads();
  SortKeys<kThreads>(keys, own.count);
  if (of_rows) {
    WriteRows(args, own, keys, sums);
    __syncthreads();
  } else {
    int32_t* list = args.build.plan + layout.list(own.core) + own.first;
    for (int i = threadIdx.x; i < own.count; i += kThreads) list[i] = PositionOf(keys[i]);
  }
  WriteParts(args, own, keys);
}

// The header: what concerns the batch as a whole.  For one block.
__device__ void WriteHeader(const SliceArgs& args, Shared<int32_t> sums) {
  const BuildArgs& build = args.build;
  const Lookups& lookups = build.lookups;
  int32_t* plan = build.plan;
  int32_t own_valid = 0, valid = 0;
  bool poisoned = false, broken = build.sentinel != nullptr && !SentinelHolds(*build.sentinel);
  for (int64_t first = threadIdx.x; first < build.layout.n; first += kThreads * kAhead) {
    int64_t rows[kAhead];
    RowsAt(build, first, kThreads, rows);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      own_valid += rows[k] >= 0;
      poisoned |= rows[k] == kPoisonedRow;
    }
  }
  const int64_t each = lookups.bags + 1, step = kThreads % each;
  int64_t within = threadIdx.x % each;  // the group
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < lookups.groups * each; i += kThreads) {
    broken |= !OffsetIsSound(lookups, i, within == 0);
    within += step;
    if (within >= each) within -= each;
  }
  BlockScan(own_valid, sums, &valid);
  const bool any_poisoned = __syncthreads_or(poisoned), any_broken = __syncthreads_or(broken);
  if (threadIdx.x < CudaPlan::kHeader) plan[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    plan[CudaPlan::kValid] = valid;
    plan[CudaPlan::kBroken] = any_broken;
    plan[CudaPlan::kBadIds] = any_poisoned;
    plan[CudaPlan::kPositions] = static_cast<int32_t>(build.layout.n);
  }
  if (build.hash) AddBatchHash({0, 1}, lookups, reinterpret_cast<unsigned long long*>(plan + CudaPlan::kHash));
}

// The block that writes the header comes first, since it has the most to read, then those of the main pivot, those of
// the other cores, and those that have some positions each.
template <typename Tables>
__global__ void __launch_bounds__(kThreads, 2) PlanSlices(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const SliceArgs& args = tables.FindInPlace(&block);
  const CudaPlan& layout = args.build.layout;
  if (args.build.skips()) return;
  SharedArena arena;
  const Shared<int32_t> words = arena.Take<int32_t>(kMaxWarps + 1);
  if (block.index == 0) return WriteHeader(args, words);
  int64_t index = block.index - 1;
  for (int turn = 0; turn < layout.d; ++turn) {
    const int core = turn == 0 ? layout.main : turn - (turn <= layout.main);
    if (index >= args.blocks[core]) {
      index -= args.blocks[core];
      continue;
    }
    OwnSlices own(args, core, index);
    const Shared<uint64_t> keys = arena.Take<uint64_t>(args.shared_keys);
    Collect(args, own, keys, args.shared_keys, words);
    if (own.count <= args.shared_keys) return Arrange(args, own, keys, words);
    uint64_t* all = args.keys + core * layout.n + own.first;
    Collect(args, own, all, own.count, words);
    return Arrange(args, own, all, words);
  }
  const int64_t position = index * kThreads + threadIdx.x;
  if (position < layout.n) WriteBag(args.build, position, RowAt(args.build, position));
}

constexpr TableKernel kPlanSlices =
    TableKernelOf<SliceArgs, PlanSlices<OneTable<SliceArgs>>, PlanSlices<ManyTables<SliceArgs>>, kThreads>::kKernel;

int DigitBits(int64_t p) {
  int bits = 1;
  while (p > int64_t{1} << bits) ++bits;
  return bits;
}

}  // namespace

bool BuildsInOneLaunch(const TTShape& shape, const CudaPlan& layout) {
  int bits = kPositionBits;
  for (int k = 0; k < shape.d; ++k) bits += DigitBits(shape.p[k]);
  const int64_t slices = *std::min_element(shape.p, shape.p + shape.d);
  return layout.n <= kMostIds && layout.n <= kMostIdsPerSlice * slices && bits <= 64;
}

void BuildBySlices(TableQueue& queue, const BuildArgs& build, Workspace& workspace) {
  const TTShape& shape = build.shape;
  const CudaPlan& layout = build.layout;
  SliceArgs args{};
  args.build = build;
  args.keys = workspace.Take<uint64_t>(layout.d * layout.n);
  args.shared_keys = std::min(layout.n, kMostShared);
  int cores[kMaxCores], shift = kPositionBits;
  SortOrder(shape, layout.main, cores);
  for (int i = 0; i < layout.d; ++i) {
    const int k = cores[i];
    args.bits[k] = DigitBits(shape.p[k]);
    args.shift[k] = shift;
    shift += args.bits[k];
  }
  args.prefix_shift = args.shift[cores[std::max(layout.d - 2, 0)]];
  uint64_t stride = 1;
  int64_t blocks = (layout.n + kThreads - 1) / kThreads + 1;
  for (int k = layout.d - 1; k >= 0; --k) {
    args.stride[k] = Divider(stride);
    args.factor[k] = Divider(static_cast<uint64_t>(shape.p[k]));
    stride *= static_cast<uint64_t>(shape.p[k]);
    const int64_t most = k == layout.main ? kMainBlocks : kListBlocks;
    const int64_t divided = std::clamp<int64_t>(std::min(shape.p[k], layout.n / kIdsPerBlock), 1, most);
    args.slices[k] = (shape.p[k] + divided - 1) / divided;
    args.blocks[k] = (shape.p[k] + args.slices[k] - 1) / args.slices[k];
    blocks += args.blocks[k];
  }
  const size_t shared = SharedBytes<int32_t>(kMaxWarps + 1) + SharedBytes<uint64_t>(args.shared_keys);
  queue.Add(kPlanSlices, blocks, shared, args);
}

}  // namespace jax_tt
