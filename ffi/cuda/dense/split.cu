// The sort of the ids of a small batch in one launch.  The ids, each with its position so that no two are equal, are
// divided among blocks by a sample of them.  A block reads all ids, keeps its own, and counts those before them, which
// tells it where its own begin: no block waits for another.  A row that is read often has positions in several blocks,
// each of which sums the gradients of its own.
#include <algorithm>

#include "ffi/cuda/dense/ids.h"
#include "ffi/cuda/dense/lanes.h"
#include "ffi/cuda/dense/plan.h"
#include "ffi/cuda/dense/sum.h"
#include "ffi/cuda/sort/warp_sort.h"
#include "ffi/cuda/tables/batch_rows.h"
#include "ffi/cuda/warp_reduce.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 512;
constexpr int kAhead = 4;                               // ids that a thread asks for at once
constexpr int kSamplesPerBlock = 4;                     // the largest share is then two to three times the average one
constexpr int kMostShared = 4096;                       // keys; a block that has more sorts them in global memory
constexpr int kMostBegun = kThreads / kDensePiece + 2;  // long rows that begin, or go on, at kThreads sorted positions
constexpr int64_t kCheckedByBlock = 4096;               // ids or offsets

// A row and a position that reads it, or the number of positions.
__device__ __forceinline__ uint64_t KeyOf(uint32_t row, int position) {
  return static_cast<uint64_t>(row) << 32 | static_cast<uint32_t>(position);
}
__device__ __forceinline__ uint32_t RowOf(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
__device__ __forceinline__ int PositionOf(uint64_t key) { return static_cast<int>(key & UINT32_MAX); }

// What the blocks of a table have in common.
struct Batch {
  const GradientTable& table;
  const TablePlan& plan;
  int index, blocks;  // of this block

  __device__ __forceinline__ int n() const { return static_cast<int>(plan.n); }
  // The row that stands for none, and comes last.
  __device__ __forceinline__ uint32_t no_row() const { return static_cast<uint32_t>(table.batch.num_embeddings); }
  // Above the keys of all positions.
  __device__ __forceinline__ uint64_t end() const { return KeyOf(no_row(), n()); }

  // The rows of positions first + k step, or reasons for naming none, which are above `no_row` in 32 bits.
  template <int kCount>
  __device__ __forceinline__ void RowsAt(int first, int step, int64_t (&rows)[kCount]) const {
    RowsOf(table.batch, n(), table.batch.num_embeddings, WholeIds{}, first, step, rows);
  }
  __device__ __forceinline__ uint64_t KeyAt(int position) const {
    int64_t row[1];
    RowsAt(position, 0, row);
    return KeyOf(min(static_cast<uint32_t>(row[0]), no_row()), position);
  }

  // Sets `rows` to the ids of positions first + k step, and returns whether all of these are rows that are read.
  // Positions before `end` are all in bags.
  template <int kCount>
  __device__ __forceinline__ bool PlainRowsAt(int first, int step, int end, uint32_t (&rows)[kCount]) const {
    if (first + (kCount - 1) * step >= end) return false;
    uint32_t highest = 0;
    if (table.batch.type == IdType::kInt64) {
      const auto* const ids = static_cast<const int64_t*>(table.batch.ids) + first;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const int64_t id = ids[k * step];
        rows[k] = static_cast<uint32_t>(id);
        highest = max(highest, static_cast<uint32_t>(min(static_cast<uint64_t>(id), uint64_t{UINT32_MAX})));
      }
    } else {
      const auto* const ids = static_cast<const uint32_t*>(table.batch.ids) + first;
#pragma unroll
      for (int k = 0; k < kCount; ++k) rows[k] = ids[k * step];
#pragma unroll
      for (int k = 0; k < kCount; ++k) highest = max(highest, rows[k]);
    }
    return highest < no_row();
  }
};

// The keys of a block, from `low` on and below `high`, which are keys of the batch but for the first and the last
// block.
struct Share {
  uint64_t low, high;
  int32_t following = 0;  // blocks whose `low` has the row of `high`
  int32_t first = 0;      // keys below
  int32_t count = 0;      // keys
  int32_t before = 0;     // keys below that have the row of `low`
  int32_t after = 0;      // keys from `high` on that have its row
};

struct SharedWords {
  Shared<uint64_t> keys;   // [kMostShared]
  Shared<float> sums;      // [4 kThreads]
  Shared<int32_t> counts;  // [kCounts]
  Shared<int32_t> begun;   // [kMostBegun]
  static constexpr int kCounts = 4;

  __device__ __forceinline__ explicit SharedWords(SharedArena& arena)
      : keys(arena.Take<uint64_t>(kMostShared)),
        sums(arena.Take<float>(4 * kThreads)),
        counts(arena.Take<int32_t>(kCounts)),
        begun(arena.Take<int32_t>(kMostBegun)) {}
  static constexpr size_t Bytes() {
    return SharedBytes<uint64_t>(kMostShared) + SharedBytes<float>(4 * kThreads) + SharedBytes<int32_t>(kCounts) +
           SharedBytes<int32_t>(kMostBegun);
  }
};

// Finds the bounds of a block's keys.  All blocks sort the same sample.
__device__ Share Divide(const Batch& batch, const SharedWords& words) {
  Share share{0, batch.end()};
  if (batch.blocks == 1) return share;
  const int samples = kSamplesPerBlock * batch.blocks, own = static_cast<int>(threadIdx.x);
  if (own < samples) {
    // One of each of these runs of positions, not always the same of a bag.
    const uint32_t run = static_cast<uint32_t>(batch.n()) / static_cast<uint32_t>(samples);
    const uint32_t random = static_cast<uint32_t>(own) * 2654435761u >> 16;
    const int position = static_cast<int>(own * run + (random * run >> 16));
    words.keys[own] = batch.KeyAt(position);
  }
  __syncthreads();
  SortByWarps<kThreads>(words.keys, samples);
  const auto low_of = [&](int block) -> uint64_t { return words.keys[kSamplesPerBlock * block]; };
  if (batch.index > 0) share.low = low_of(batch.index);
  if (batch.index + 1 < batch.blocks) share.high = low_of(batch.index + 1);
  const bool follows = own > batch.index && own < batch.blocks && RowOf(low_of(own)) == RowOf(share.high);
  share.following = __syncthreads_count(follows);
  return share;
}

// Rows from `first` to `last`: one that bounds the keys of a block.
struct BoundRow {
  uint32_t first, last;
  int position;

  __device__ __forceinline__ BoundRow(const Batch& batch, uint64_t key)
      : first(RowOf(key)), last(first == batch.no_row() ? UINT32_MAX : first), position(PositionOf(key)) {}
};

// Of the positions from `first` on that a thread reads at once, a bit for each that is before `end`.
__device__ __forceinline__ uint32_t BitsBefore(int end, int first) {
  const int count = min(max(end - first + kThreads - 1, 0) / kThreads, kAhead);
  return (1u << count) - 1;
}

// Counts keys, and puts the positions of the block's into `keys` in any order, as far as they fit.
template <typename Keys>
__device__ void Collect(const Batch& batch, const SharedWords& words, Keys keys, int most, Share* share) {
  const int n = batch.n(), lane = static_cast<int>(threadIdx.x) % 32;
  const BoundRow low(batch, share->low), high(batch, share->high);
  const int plain_end = EndOfFullGroups(batch.table.batch, n);
  enum { kBelow, kBefore, kAfter, kOwn };
  uint32_t below = 0, before = 0, after = 0;
  if (threadIdx.x < SharedWords::kCounts) words.counts[threadIdx.x] = 0;
  __syncthreads();
  for (int first = static_cast<int>(threadIdx.x); first < n; first += kThreads * kAhead) {
    uint32_t rows[kAhead], exists = (1u << kAhead) - 1;
    if (!batch.PlainRowsAt(first, kThreads, plain_end, rows)) {  // seldom
      int64_t found[kAhead];
      batch.RowsAt(first, kThreads, found);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) rows[k] = static_cast<uint32_t>(found[k]);
      exists = BitsBefore(n, first);
    }
    // Bits for all positions instead of branches: in most warps some lane would take them.
    uint32_t near = 0, up_to_low = 0, from_high = 0;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (rows[k] - low.first <= high.last - low.first) near |= 1u << k;
      if (rows[k] <= low.last) up_to_low |= 1u << k;
      if (rows[k] >= high.first) from_high |= 1u << k;
    }
    below += __popc(up_to_low & ~near);
    uint32_t own = near & exists;
    if ((own & (up_to_low | from_high)) != 0) {  // seldom
      const uint32_t early = own & up_to_low & BitsBefore(low.position, first);
      const uint32_t late = own & from_high & ~BitsBefore(high.position, first);
      before += __popc(early);
      after += __popc(late);
      own &= ~(early | late);
    }
    if (own == 0) continue;
    int32_t place = atomicAdd(words.counts + kOwn, __popc(own));
    for (; own != 0; own &= own - 1, ++place)
      if (place < most) keys[place] = static_cast<uint64_t>(first + (__ffs(static_cast<int>(own)) - 1) * kThreads);
  }
  const auto add = [&](int to, uint32_t value) {
    const uint32_t sum = SumOfWarp(value);
    if (lane == 0) atomicAdd(words.counts + to, static_cast<int32_t>(sum));
  };
  add(kBelow, below);
  if (__any_sync(kAllLanes, (before | after) != 0)) {
    add(kBefore, before);
    add(kAfter, after);
  }
  __syncthreads();
  share->before = words.counts[kBefore];
  share->after = words.counts[kAfter];
  share->count = words.counts[kOwn];
  share->first = words.counts[kBelow] + share->before;
  __syncthreads();
}

// The sorted keys of a block, and the parts of rows that they are.
template <typename Keys>
struct SortedShare {
  const Batch& batch;
  const Share& share;
  Keys keys;

  __device__ __forceinline__ uint32_t RowAt(int i) const { return RowOf(keys[i]); }
  // Of the row that begins, or goes on, at a key.
  __device__ __forceinline__ int End(int i) const {
    const uint32_t row = RowAt(i);
    int end = i + 1;
    for (int high = share.count; end < high;) {
      const int middle = (end + high) / 2;
      if (RowAt(middle) == row)
        end = middle + 1;
      else
        high = middle;
    }
    return end;
  }
  // Positions of the row of key i in the blocks before this one.
  __device__ __forceinline__ int32_t Before(int i) const {
    return i == 0 && RowAt(0) == RowOf(share.low) ? share.before : 0;
  }
  // Positions of the row of key i, of which `end` is the last one's in this block, in the blocks after this one.
  __device__ __forceinline__ int32_t After(int i, int end) const {
    return end == share.count && RowAt(i) == RowOf(share.high) ? share.after : 0;
  }
  // Whether a long row begins, or goes on from the block before, at a key.
  __device__ __forceinline__ bool HasLongRow(int i) const {
    const uint32_t row = RowAt(i);
    if (row == batch.no_row() || (i > 0 && RowAt(i - 1) == row)) return false;
    if (i + kDensePiece < share.count && RowAt(i + kDensePiece) == row) return true;
    // Most rows are in one block, and no longer than this one has found.
    const int32_t after = RowAt(share.count - 1) == row ? After(i, share.count) : 0;
    if (Before(i) + after == 0) return false;
    return Before(i) + (End(i) - i) + after > kDensePiece;
  }

  __device__ __forceinline__ void Write() const {
    const GradientTable& table = batch.table;
    const TablePlan& plan = batch.plan;
    for (int i = threadIdx.x; i < share.count; i += kThreads) {
      const uint64_t key = keys[i];
      const uint32_t row = RowOf(key);
      const int position = PositionOf(key), to = share.first + i;
      plan.keys.Set(to, row);
      if (row == batch.no_row()) continue;
      // With offsets out of order it may be in none; then nothing comes of it, but its bag must exist.
      plan.bag[to] = max(BagOf(table.batch, position), 0);
      if (table.batch.weights != nullptr) plan.weight[to] = table.batch.weights[position];
    }
  }

  // Sums what the block has of a long row that begins, or goes on, at key `begin`, or nothing behind all keys, by a
  // team of `warps` warps.  Every thread of the block must call this.
  template <int V>
  __device__ __forceinline__ void SumLongRow(int begin, int warps, Shared<float> sums) const {
    constexpr int kBatch = 4;
    const TablePlan& plan = batch.plan;
    const GradientSource from(batch.table, plan);
    const RowLanes lanes = RowLanes::For(from.dim, V);
    const int thread = static_cast<int>(threadIdx.x) & (warps * 32 - 1), group = thread / lanes.count;
    const int end = begin < share.count ? End(begin) : begin;
    const int groups = warps * 32 / lanes.count, each = (end - begin + groups - 1) / groups;
    const int own = min(end, begin + group * each);
    const PositionSum<kBatch, V> sum{from, static_cast<uint32_t>(share.first + own), min(each, end - own)};
    // The sums of parts that are not the first of their rows come after those of pieces.
    const int32_t parts = (batch.n() + kDensePiece - 1) / kDensePiece + 1;
    int32_t place = parts + batch.index;
    if (begin < end && Before(begin) == 0) {
      place = static_cast<int32_t>(plan.LongRowPlace(static_cast<uint32_t>(share.first + begin)));
      if (thread == 0) plan.more[place] = {parts + batch.index + 1, After(begin, end) > 0 ? share.following : 0};
    }
    for (int first = 0; first < from.dim; first += lanes.count * V) {
      const int column = first + lanes.lane() * V;
      const Packet<float, V> value = SumOverTeam(lanes, warps, sum(column).Value(), sums);
      if (begin < end && group == 0 && column < from.dim)
        StorePacket(value, plan.partial + static_cast<int64_t>(place) * from.dim + column);
    }
  }

  __device__ __forceinline__ void SumLongRows(const SharedWords& words) const {
    const Shared<int32_t> found = words.counts;
    for (int base = 0; base < share.count; base += kThreads) {
      if (threadIdx.x == 0) found[0] = 0;
      __syncthreads();
      const int i = base + static_cast<int>(threadIdx.x);
      if (i < share.count && HasLongRow(i)) words.begun[atomicAdd(found, 1)] = i;
      __syncthreads();
      const int32_t count = found[0];
      // As many teams as rows, as far as there are warps, so that rows do not wait for each other.
      int teams = 1;
      while (teams < count && teams < kThreads / 32) teams *= 2;
      const int warps = kThreads / 32 / teams, team = static_cast<int>(threadIdx.x) / (32 * warps);
      for (int first = 0; first < count; first += teams) {
        const int begin = first + team < count ? words.begun[first + team] : share.count;
        if (batch.table.widths.four_wide)
          SumLongRow<4>(begin, warps, words.sums);
        else
          SumLongRow<1>(begin, warps, words.sums);
      }
      __syncthreads();
    }
  }
};

template <typename Keys>
__device__ void Arrange(const Batch& batch, const Share& share, Keys keys, const SharedWords& words) {
  for (int i = threadIdx.x; i < share.count; i += kThreads) {
    const uint64_t position = keys[i];
    keys[i] = batch.KeyAt(static_cast<int>(position));
  }
  __syncthreads();
  SortByWarps<kThreads>(keys, share.count);
  const SortedShare<Keys> sorted{batch, share, keys};
  sorted.Write();
  __syncthreads();
  sorted.SumLongRows(words);
}

int64_t CheckBlocks(const DenseBatch& batch) {
  const int64_t most = std::max(batch.n(), batch.groups * (batch.bags + 1));
  return std::clamp<int64_t>((most + kCheckedByBlock - 1) / kCheckedByBlock, 1, kBadWords);
}

// Sets the flags of a table, of which each block looks for trouble in a share of the ids and offsets.
__device__ void CheckBatch(const Batch& batch) {
  const DenseBatch& of = batch.table.batch;
  const int step = batch.blocks * kThreads, first = batch.index * kThreads + static_cast<int>(threadIdx.x);
  const int64_t per_group = of.bags + 1;
  bool bad_offsets = false, bad_ids = false;
  for (int64_t i = first; i < of.groups * per_group; i += step) {
    const bool begins = static_cast<uint64_t>(i) % static_cast<uint64_t>(per_group) == 0;
    bad_offsets |= !OffsetIsSound(of, i, begins);
  }
  for (int i = first; i < batch.n(); i += step * kAhead) {
    int64_t rows[kAhead];
    batch.RowsAt(i, step, rows);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) bad_ids |= rows[k] == kPoisonedRow;
  }
  const bool any_offsets = __syncthreads_or(bad_offsets), any_ids = __syncthreads_or(bad_ids);
  int32_t* const flags = batch.plan.flags;
  if (threadIdx.x == 0) flags[batch.index] = (any_offsets ? kBadOffsets : 0) | (any_ids ? kBadIds : 0);
  const int flag = static_cast<int>(threadIdx.x);
  if (batch.index == 0 && flag >= batch.blocks && flag < kDenseFlags) flags[flag] = 0;
}

// The blocks that look for trouble come last.
__global__ void __launch_bounds__(kThreads, 2)
    SplitAndSort(const __grid_constant__ TableList<GradientTable> tables, const __grid_constant__ DensePlan all) {
  SharedArena arena;
  const SharedWords words(arena);
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const TablePlan plan = all.Of(table);
  const int index = static_cast<int>(block.index), blocks = static_cast<int>(SplitBlocks(plan.n));
  if (index >= blocks) return CheckBatch({table, plan, index - blocks, static_cast<int>(block.count) - blocks});
  const Batch batch{table, plan, index, blocks};
  Share share = Divide(batch, words);
  Collect(batch, words, words.keys, kMostShared, &share);
  if (share.count <= kMostShared) return Arrange(batch, share, words.keys, words);
  uint64_t* const keys = all.split + (table.place.position - all.sorted_together) + share.first;
  Collect(batch, words, keys, share.count, &share);
  Arrange(batch, share, keys, words);
}

}  // namespace

void AddSplit(const DensePlan& plan, GradientLaunches& launches) {
  launches.Add([](const GradientTable& table) { return SplitsRows(table); },
               [](const GradientTable& table) { return SplitBlocks(table.batch.n()) + CheckBlocks(table.batch); },
               [plan](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
                 return Launch(stream, on.blocks, kThreads, SharedWords::Bytes(), SplitAndSort, on.tables, plan);
               });
}

}  // namespace jax_tt
