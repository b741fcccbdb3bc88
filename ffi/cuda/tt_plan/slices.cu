// The plan in one launch.  A block owns some slices of one core.  It reads all ids, keeps the positions that have its
// slices, and counts those that have earlier ones, which tells it where its own begin: no block waits for another.
//
// A block runs each instruction a few times only, and waits for those that it has not run before: code that is short
// takes less time than loops that are unrolled.
#include <algorithm>

#include "ffi/core/divider.h"
#include "ffi/core/sentinel.h"
#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/sort/merge_runs.h"
#include "ffi/cuda/tt_plan/build.h"
#include "ffi/cuda/warp_reduce.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;
// Blocks of a multiprocessor at a time, which bounds the registers of a thread: as many as spill none.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = 2;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = 4;
#endif
// Ids that a warp takes at a time, and those of a lane, which loads four at once.
constexpr int kIdsOfLane = 8, kIdsOfWarp = 32 * kIdsOfLane, kIdsOfLoad = 4;
// A key holds the digits of a position, the most significant highest, and below them the position.
constexpr int kPositionBits = 16;
constexpr int64_t kMostIds = int64_t{1} << kPositionBits;
constexpr int64_t kMostIdsPerSlice = 4096;  // on average, of every core
// Keys in shared memory, twice; a block whose slices have more sorts them in global memory.
constexpr int64_t kMostShared = 4096;
// Blocks of a core at most.  Those of the main pivot have more to do.
constexpr int64_t kMainBlocks = 128, kListBlocks = 64;
constexpr int64_t kIdsPerBlock = 64;  // at least, on average

struct SliceArgs {
  BuildArgs build;
  bool narrow;  // whether ids are whole, of 32 bits and aligned, and rows few enough for a Band
  // By core: what to divide a row by to get at its digit, the digit's place in a key, and the blocks.
  Divider stride[kMaxCores], factor[kMaxCores];
  uint64_t fraction[kMaxCores];  // of a Band
  int shift[kMaxCores], bits[kMaxCores];
  int prefix_shift;  // keys shifted right by this are equal if rows share the slices of the pivot and of the core that
                     // is contracted with it first
  int64_t slices[kMaxCores], blocks[kMaxCores];
  int64_t parts[kMaxCores];  // their places in the plan
  int64_t shared_keys;
  uint64_t* keys;  // [2, d, n]

  __device__ __forceinline__ int32_t Digit(int core, int64_t row) const {
    const uint64_t quotient = stride[core].Quotient(static_cast<uint64_t>(row));
    return static_cast<int32_t>(quotient - factor[core].Quotient(quotient) * factor[core].divisor());
  }
  __device__ __forceinline__ int32_t DigitOf(int core, uint64_t key) const {
    return static_cast<int32_t>(key >> shift[core] & ((uint64_t{1} << bits[core]) - 1));
  }
  // The same of the core whose digit is the highest.
  __device__ __forceinline__ int32_t SliceOf(int core, uint64_t key) const {
    return static_cast<int32_t>(key >> shift[core]);
  }
};

constexpr uint64_t kPositionMask = (uint64_t{1} << kPositionBits) - 1;
__device__ __forceinline__ int32_t PositionOf(uint64_t key) { return static_cast<int32_t>(key & kPositionMask); }

// A key that has the row in place of the digits.
__device__ __forceinline__ uint64_t RowKey(uint64_t row, unsigned position) { return row << kPositionBits | position; }

// The slices of a block, and what the batch has of them.
struct OwnSlices {
  int core;
  int64_t begin, end;     // of the slices
  int32_t first = 0;      // positions with earlier slices
  int32_t count = 0;      // with these
  int32_t valid = 0;      // with any
  bool poisoned = false;  // whether any position is
  __device__ OwnSlices(const SliceArgs& args, int core, int64_t block)
      : core(core), begin(block * args.slices[core]), end(min(begin + args.slices[core], args.build.layout.p[core])) {}
};

// Tells without a division whether a row has slices of a block.  A core's digit repeats after `period` rows.  With m =
// ceil(2^64 / period), the low word of row m is the row's place in its period, as a fraction of it.  Where rows and
// periods are at most 2^31, that is at least m times the place and less than 2^31 above it, and m is at least 2^33: the
// upper halves of fractions compare as the places do.
class Band {
 public:
  static uint64_t Fraction(uint64_t period) { return UINT64_MAX / period + 1; }
  __device__ __forceinline__ Band(const SliceArgs& args, const OwnSlices& own) : fraction_(args.fraction[own.core]) {
    const uint64_t slice = args.stride[own.core].divisor() * fraction_;
    begin_ = static_cast<uint32_t>(slice * static_cast<uint64_t>(own.begin) >> 32);
    last_ = static_cast<uint32_t>(slice * static_cast<uint64_t>(own.end) >> 32) - 1 - begin_;
  }
  // Of a row, for the two below: how far it is from the begin of the slices.
  __device__ __forceinline__ uint32_t From(uint32_t row) const {
    return __umulhi(row, static_cast<uint32_t>(fraction_)) + row * static_cast<uint32_t>(fraction_ >> 32) - begin_;
  }
  __device__ __forceinline__ bool Has(uint32_t from) const { return from <= last_; }
  __device__ __forceinline__ bool IsBelow(uint32_t from) const { return from > ~begin_; }

 private:
  uint64_t fraction_;
  uint32_t begin_, last_;
};

__device__ __forceinline__ void LoadIds(const void* ids, int64_t first, uint32_t* loaded) {
  const uint4 four = *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(ids) + first);
  loaded[0] = four.x;
  loaded[1] = four.y;
  loaded[2] = four.z;
  loaded[3] = four.w;
}

// Of the ids that a lane takes at a time, the first of which is at `first`.
__device__ __forceinline__ unsigned PositionOfLane(unsigned first, unsigned k) {
  return first + k / kIdsOfLoad * (32 * kIdsOfLoad) + k % kIdsOfLoad;
}

// What Collect counts, in shared memory.
enum Counts { kOwn = 0, kBelow = 1, kWithRow = 2, kAnyPoisoned = 3, kCounts = 4 };

// Sets the counts, and puts the rows with these slices into `keys` in any order, as far as they fit, each above its
// position.
template <typename Keys>
__device__ void Collect(const SliceArgs& args, OwnSlices& own, Keys keys, int most, Shared<int32_t> counts) {
  const Lookups& lookups = args.build.lookups;
  const int n = static_cast<int>(args.build.layout.n), lane = threadIdx.x % 32;
  const int plain_end = EndOfFullGroups(lookups, n);
  // Behind the last bag of one group is none.
  const int end = lookups.groups == 1 || lookups.bags == 0 ? plain_end : n;
  const Band band(args, own);
  const int32_t first_slice = static_cast<int32_t>(own.begin), slices_end = static_cast<int32_t>(own.end);
  const uint32_t rows = static_cast<uint32_t>(args.build.shape.num_embeddings);
  const bool narrow = args.narrow;
  const void* const ids = lookups.ids;
  if (threadIdx.x < kCounts) counts[threadIdx.x] = 0;
  __syncthreads();
  uint32_t below = 0, valid = 0;
#pragma unroll 1
  for (int base = (static_cast<int>(threadIdx.x) - lane) * kIdsOfLane; base < end; base += kThreads / 32 * kIdsOfWarp) {
    const unsigned at = static_cast<unsigned>(base + lane * kIdsOfLoad);
    unsigned mine = 0;  // bits of the lane's positions with these slices
    bool plain = narrow && base + kIdsOfWarp <= plain_end;
    if (plain) {
      uint32_t row[kIdsOfLane];
#pragma unroll
      for (unsigned k = 0; k < kIdsOfLane; k += kIdsOfLoad) LoadIds(ids, PositionOfLane(at, k), row + k);
      unsigned earlier = 0;
      bool outside = false;
#pragma unroll
      for (int k = 0; k < kIdsOfLane; ++k) {
        const uint32_t from = band.From(row[k]);
        outside |= row[k] >= rows;
        if (band.Has(from)) mine |= 1u << k;
        if (band.IsBelow(from)) earlier |= 1u << k;
      }
      plain = !outside;
      if (plain) {
        below += __popc(earlier);
        valid += kIdsOfLane;
      }
    }
    if (!plain) {
      mine = 0;
#pragma unroll 1
      for (unsigned k = 0; k < kIdsOfLane; ++k) {
        const unsigned position = PositionOfLane(at, k);
        const int64_t row = RowAt(args.build, position);
        if (row == kPoisonedRow) atomicOr(counts + kAnyPoisoned, 1);
        if (row < 0) continue;
        const int32_t slice = args.Digit(own.core, row);
        ++valid;
        below += slice < first_slice;
        if (slice < first_slice || slice >= slices_end) continue;
        const int place = atomicAdd(counts + kOwn, 1);
        if (place < most) keys[place] = RowKey(static_cast<uint64_t>(row), position);
      }
    }
    if (mine == 0) continue;
    int place = atomicAdd(counts + kOwn, __popc(mine));
#pragma unroll 1
    for (; mine != 0; mine &= mine - 1, ++place) {
      const unsigned position = PositionOfLane(at, static_cast<unsigned>(__ffs(static_cast<int>(mine))) - 1);
      if (place < most) keys[place] = RowKey(static_cast<const uint32_t*>(ids)[position], position);
    }
  }
  below = SumOfWarp(below);
  valid = SumOfWarp(valid);
  if (lane == 0) {
    atomicAdd(counts + kBelow, static_cast<int32_t>(below));
    atomicAdd(counts + kWithRow, static_cast<int32_t>(valid));
  }
  __syncthreads();
  own.count = counts[kOwn];
  own.first = counts[kBelow];
  own.valid = counts[kWithRow];
  own.poisoned = counts[kAnyPoisoned] != 0;
}

// Numbers the rows of the main pivot's sorted keys, and leaves the number of each in `row_of`.
template <typename Keys>
__device__ void WriteRows(const SliceArgs& args, const OwnSlices& own, Keys keys, Keys row_of, Shared<int32_t> sums) {
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
#pragma unroll 1
  for (int i = begin; i < end; ++i) heads += starts(i);
  int32_t row = own.first + BlockScan(heads, sums, &rows) - 1;
  for (int i = begin; i < end; ++i) {
    const uint64_t key = keys[i];
    const int32_t position = PositionOf(key);
    const bool is_head = starts(i);
    if (is_head) {
      ++row;
      plan[layout.row_begin() + row] = own.first + i;
#pragma unroll 1
      for (int k = 0; k < layout.d; ++k) plan[layout.row_digit(k) + row] = args.DigitOf(k, key);
    }
    row_of[i] = static_cast<uint64_t>(row);
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
__device__ __forceinline__ int32_t FirstPart(const CudaPlan& layout, int core, int64_t slice, int32_t entries) {
  return static_cast<int32_t>(static_cast<uint32_t>(entries) / static_cast<uint32_t>(layout.least_rows[core]) +
                              min(slice, static_cast<int64_t>(entries)));
}

// Cuts [begin, end) into parts of equal size.  For one thread.
__device__ void CutEvenly(int32_t slice, int32_t begin, int32_t end, int32_t size, PlanPart* to) {
  const int32_t count =
      static_cast<int32_t>(static_cast<uint32_t>(end - begin + size - 1) / static_cast<uint32_t>(size));
#pragma unroll 1
  for (int32_t part = 0; part < count; ++part) {
    const int32_t first = begin + part * size;
    to[part] = {slice, first, min(first + size, end), part == 0 ? count : -part};
  }
}

// Cuts the rows of the slice whose keys begin at `begin`, the first of which is `row`, after every `part_tiles` full
// tiles.  For a warp.
template <typename Keys>
__device__ void CutByTiles(const SliceArgs& args, const OwnSlices& own, Keys keys, int begin, int32_t row,
                           PlanPart* to) {
  const CudaPlan& layout = args.build.layout;
  const int tile_rows = static_cast<int>(layout.tile_rows), tile_prefixes = static_cast<int>(layout.tile_prefixes);
  const int lane = threadIdx.x % 32;
  const unsigned up_to = kAllLanes >> (31 - lane);
  const int32_t slice = args.SliceOf(own.core, keys[begin]);
  int32_t first = row, count = 0;
  const auto write = [&] {
    if (lane == 0) to[count] = {slice, first, row, -count};
    ++count;
    first = row;
  };
  int rows = 0, prefixes = 0, tiles = 0;  // of the tile, and full ones of the part
  unsigned inside = kAllLanes;
#pragma unroll 1
  for (int i = begin + lane; inside == kAllLanes; i += 32) {
    uint64_t key = 0, before = 0;
    if (i < own.count) key = keys[i];
    const bool is_inside = i < own.count && args.SliceOf(own.core, key) == slice;
    if (is_inside && i > begin) before = keys[i - 1];
    const bool starts = is_inside && (i == begin || key >> kPositionBits != before >> kPositionBits);
    inside = __ballot_sync(kAllLanes, is_inside);
    const unsigned heads = __ballot_sync(kAllLanes, starts);
    const unsigned prefix_heads =
        __ballot_sync(kAllLanes, starts && key >> args.prefix_shift != before >> args.prefix_shift);
    unsigned after;
#pragma unroll 1
    for (unsigned left = inside;; left &= -after) {
      // The first row of a tile has a prefix whatever the row before it has.
      const unsigned with_prefix = left & (prefix_heads | (rows == 0 ? left & -left : 0));
      const bool beyond = starts && (rows + __popc(heads & left & up_to) > tile_rows ||
                                     prefixes + __popc(with_prefix & up_to) > tile_prefixes);
      after = __ballot_sync(kAllLanes, beyond && (left >> lane & 1) != 0);
      after &= -after;  // the first of them
      const unsigned taken = after == 0 ? kAllLanes : after - 1;
      row += __popc(heads & left & taken);
      rows += __popc(heads & left & taken);
      prefixes += __popc(with_prefix & taken);
      if (after == 0) break;
      rows = prefixes = 0;
      if (++tiles < layout.part_tiles) continue;
      tiles = 0;
      write();
    }
  }
  write();
  if (lane == 0) to[0].count = count;
}

// Marks all numbers of these slices' parts as ones without a part.
__device__ void ClearParts(const SliceArgs& args, const OwnSlices& own) {
  const CudaPlan& layout = args.build.layout;
  PlanPart* parts = PartsAt(args.build.plan, args.parts[own.core]);
  const int32_t end = own.end == layout.p[own.core] ? static_cast<int32_t>(layout.max_parts[own.core])
                                                    : FirstPart(layout, own.core, own.end, own.first + own.count);
#pragma unroll 1
  for (int i = FirstPart(layout, own.core, own.begin, own.first) + threadIdx.x; i < end; i += kThreads)
    parts[i] = kNoPart;
}

// `row_of`: of the main pivot's keys.
template <typename Keys>
__device__ void WriteParts(const SliceArgs& args, const OwnSlices& own, Keys keys, Keys row_of) {
  const CudaPlan& layout = args.build.layout;
  PlanPart* parts = PartsAt(args.build.plan, args.parts[own.core]);
  const auto slice_at = [&](int i) { return args.SliceOf(own.core, keys[i]); };
  const auto starts_at = [&](int i) { return i < own.count && (i == 0 || slice_at(i - 1) != slice_at(i)); };
  const auto parts_at = [&](int i) { return parts + FirstPart(layout, own.core, slice_at(i), own.first + i); };
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int base = static_cast<int>(threadIdx.x) - lane; base < own.count; base += kThreads) {
    const bool starts = starts_at(base + lane);
    if (own.core == layout.main) {
      for (unsigned left = __ballot_sync(kAllLanes, starts); left != 0; left &= left - 1) {
        const int i = base + __ffs(static_cast<int>(left)) - 1;
        CutByTiles(args, own, keys, i, static_cast<int32_t>(row_of[i]), parts_at(i));
      }
    } else if (starts) {
      const int begin = base + lane;
      const int32_t slice = slice_at(begin);
      int end = begin + 1;
#pragma unroll 1
      for (int high = own.count; end < high;) {
        const int middle = (end + high) / 2;
        if (slice_at(middle) == slice)
          end = middle + 1;
        else
          high = middle;
      }
      CutEvenly(slice, own.first + begin, own.first + end, static_cast<int32_t>(layout.part_rows[own.core]),
                parts_at(begin));
    }
  }
}

// The key with digits: of the main pivot with those of all cores, of another one with its own.
__device__ __forceinline__ uint64_t DigitKey(const SliceArgs& args, int core, uint64_t row_key) {
  const CudaPlan& layout = args.build.layout;
  uint64_t rest = row_key >> kPositionBits, key = row_key & kPositionMask;
  const int last = core == layout.main ? 0 : core;
#pragma unroll 1
  for (int k = layout.d - 1; k >= last; --k) {
    const uint64_t quotient = args.factor[k].Quotient(rest);
    if (core == layout.main || k == core) key |= (rest - quotient * args.factor[k].divisor()) << args.shift[k];
    rest = quotient;
  }
  return key;
}

// From the rows in `keys` to the plan.  `others`: room for as many.
template <typename Keys>
__device__ void Arrange(const SliceArgs& args, const OwnSlices& own, Keys keys, Keys others, Shared<int32_t> sums) {
  const CudaPlan& layout = args.build.layout;
  const int lane = threadIdx.x % 32;
  ClearParts(args, own);
#pragma unroll 1
  for (int base = static_cast<int>(threadIdx.x) - lane; base < own.count; base += kThreads) {
    const int i = base + lane;
    uint64_t key = UINT64_MAX;
    if (i < own.count) key = DigitKey(args, own.core, keys[i]);
    key = SortLanes(key);
    if (i < own.count) keys[i] = key;
  }
  __syncthreads();
  MergeRuns<kThreads>(&keys, &others, own.count);
  if (own.core == layout.main) {
    WriteRows(args, own, keys, others, sums);
    __syncthreads();
  } else {
    int32_t* list = args.build.plan + layout.list(own.core) + own.first;
#pragma unroll 1
    for (int i = threadIdx.x; i < own.count; i += kThreads) list[i] = PositionOf(keys[i]);
  }
  WriteParts(args, own, keys, others);
}

// The header: what concerns the batch as a whole, of which `own` has the counts.  For one block.
__device__ void WriteHeader(const SliceArgs& args, const OwnSlices& own) {
  const BuildArgs& build = args.build;
  const Lookups& lookups = build.lookups;
  int32_t* plan = build.plan;
  bool broken = build.sentinel != nullptr && !SentinelHolds(*build.sentinel);
  const uint32_t each = static_cast<uint32_t>(lookups.bags) + 1, step = kThreads % each;
  const int64_t offsets = lookups.groups * each;
  uint32_t within = threadIdx.x % each;  // the group
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < offsets; i += kThreads) {
    broken |= !OffsetIsSound(lookups, i, within == 0);
    within += step;
    if (within >= each) within -= each;
  }
  const bool any_broken = __syncthreads_or(broken);
  if (threadIdx.x < CudaPlan::kHeader) {
    int32_t word = 0;
    if (threadIdx.x == CudaPlan::kValid) word = own.valid;
    if (threadIdx.x == CudaPlan::kBroken) word = any_broken;
    if (threadIdx.x == CudaPlan::kBadIds) word = own.poisoned;
    if (threadIdx.x == CudaPlan::kPositions) word = static_cast<int32_t>(build.layout.n);
    plan[threadIdx.x] = word;
  }
  if (!build.hash) return;
  __syncthreads();
  AddBatchHash({0, 1}, lookups, reinterpret_cast<unsigned long long*>(plan + CudaPlan::kHash));
}

// The block that writes the header comes first, since it reads most, then those of the main pivot, those of the other
// cores, and those that have some positions each.
template <typename Tables>
__global__ void __launch_bounds__(kThreads, kBlocks) PlanSlices(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const SliceArgs& args = tables.FindInPlace(&block);
  const CudaPlan& layout = args.build.layout;
  if (args.build.skips()) return;
  const bool is_header = block.index == 0;
  int64_t index = is_header ? 0 : block.index - 1;
  int core = layout.main, turn = 0;
#pragma unroll 1
  for (; turn < layout.d; ++turn) {
    core = turn == 0 ? layout.main : turn - (turn <= layout.main);
    if (index < args.blocks[core]) break;
    index -= args.blocks[core];
  }
  if (turn == layout.d) {
    const int64_t position = index * kThreads + threadIdx.x;
    if (position < layout.n) WriteBag(args.build, position, RowAt(args.build, position));
    return;
  }
  SharedArena arena;
  const Shared<int32_t> words = arena.Take<int32_t>(kMaxWarps);
  const Shared<int32_t> counts = arena.Take<int32_t>(kCounts);
  const Shared<uint64_t> keys = arena.Take<uint64_t>(args.shared_keys);
  const Shared<uint64_t> others = arena.Take<uint64_t>(args.shared_keys);
  OwnSlices own(args, core, index);
  Collect(args, own, keys, is_header ? 0 : static_cast<int>(args.shared_keys), counts);
  if (is_header) return WriteHeader(args, own);
  if (own.count <= args.shared_keys) return Arrange(args, own, keys, others, words);
  __syncthreads();
  uint64_t* const all = args.keys + core * layout.n + own.first;
  Collect(args, own, all, own.count, counts);
  Arrange(args, own, all, all + layout.d * layout.n, words);
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
  args.keys = workspace.Take<uint64_t>(2 * layout.d * layout.n);
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
    args.fraction[k] = Band::Fraction(stride);
    const int64_t most = k == layout.main ? kMainBlocks : kListBlocks;
    const int64_t divided = std::clamp<int64_t>(std::min(shape.p[k], layout.n / kIdsPerBlock), 1, most);
    args.slices[k] = (shape.p[k] + divided - 1) / divided;
    args.blocks[k] = (shape.p[k] + args.slices[k] - 1) / args.slices[k];
    blocks += args.blocks[k];
    args.parts[k] = layout.parts(k);
  }
  const Lookups& lookups = build.lookups;
  args.narrow = (lookups.type == IdType::kInt32 || lookups.type == IdType::kUint32) && stride <= uint64_t{1} << 31 &&
                reinterpret_cast<uintptr_t>(lookups.ids) % alignof(uint4) == 0;
  const size_t shared =
      SharedBytes<int32_t>(kMaxWarps) + SharedBytes<int32_t>(kCounts) + 2 * SharedBytes<uint64_t>(args.shared_keys);
  queue.Add(kPlanSlices, blocks, shared, args);
}

}  // namespace jax_tt
