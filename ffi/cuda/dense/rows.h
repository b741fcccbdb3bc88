// The gradients of the rows of a batch, handed to a sink that stores or applies them.
//
// A sink is made for the table of a block, Sink(table, plan), and called with a row and with sum(column), the gradient
// of the V columns from there on:
//   template <int V>
//   void Row(const RowLanes& lanes, int64_t row, int dim, bool owner, const RowSum<V>& sum) const;
//   static constexpr int Blocks(int V);
// Blocks(V) are on a multiprocessor at the same time, at least; for more of them registers would have to be spilled.
// Every lane of the warp calls Row, as often as the others; only lanes with `owner` set have a row to write.  One
// thread of each table calls Finish, and says whether the batch reads no row because something is wrong with it.
// bool Skips() const says that no row is wanted.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "ffi/cuda/dense/sum.h"
#include "ffi/cuda/kernel_launch.h"

namespace jax_tt {

// The row that begins at a sorted position.
struct BatchRow {
  bool exists = false;
  bool is_long = false;
  uint32_t begin = 0;
  int64_t row = 0;
  int count = 0;  // of positions; of no use for a long row
  // Of the first position.
  int32_t bag = 0;
  float weight = 0;
};

// The sorted positions that the lanes of a row take, one after another: what a warp does once is shared by as many as
// there are, but only once the positions of a call are enough to occupy a large GPU with fewer warps.
JAX_TT_INLINE int RunOfLanes(int64_t positions, const RowLanes& lanes) {
  constexpr int64_t kManyBlocks = 512;
  int run = 1;
  // The runs of a warp are 32 positions at most.
  while (run < lanes.count && positions * lanes.count > kManyBlocks * kDenseThreads * run) run *= 2;
  return run;
}

// The rows that begin in the runs of a warp.  Every lane of the warp must call everything.
class RunRows {
 public:
  __device__ __forceinline__ RunRows(const GradientSource& from, const RowLanes& lanes, int run, int64_t block,
                                     int64_t num_embeddings)
      // One call takes at most 2^31 - 1 positions.
      : n_(static_cast<uint32_t>(from.plan.n)) {
    const TablePlan& plan = from.plan;
    const unsigned lane = threadIdx.x % 32, group = lane >> (__ffs(lanes.count) - 1);
    const int taken = 32 / lanes.count * run;
    const auto warp = static_cast<uint32_t>(block) * (kDenseThreads / 32) + threadIdx.x / 32;
    first_ = warp * taken;
    if (first_ >= n_) return;
    row_ = num_embeddings;
    if (first_ + lane < n_) {
      row_ = plan.Row(first_ + lane);
      bag_ = plan.bag[first_ + lane];
      if (from.weighted) weight_ = plan.weight[first_ + lane];
    }
    heads_ = HeadsAt(plan, first_);
    // Positions that read no row come last.
    const int reading = __popc(__ballot_sync(kAllLanes, row_ < num_embeddings));
    const int begin = static_cast<int>(group) * run;
    end_ = min(begin + run, reading);
    // Most rows end among the positions that the warp has read.  Those that are longer than what it looks at are long.
    constexpr int kLooked = 32 + kDensePiece;
    unsigned behind = static_cast<unsigned>(uint64_t{heads_} >> taken);
    after_ = kLooked;
#pragma unroll 1
    for (int looked = 32; looked < kLooked && behind == 0; looked += 32) {
      behind = HeadsAt(plan, first_ + looked);
      if (behind != 0) after_ = looked + __ffs(static_cast<int>(behind)) - 1;
    }
    heads_ &= ~0u << begin;
    begin_ = NextHead();
  }

  // Whether a row is left.
  __device__ __forceinline__ bool Any() const { return __any_sync(kAllLanes, begin_ < end_); }

  // The next row of the lanes' run, which does not exist behind the last one.
  __device__ __forceinline__ BatchRow Next() {
    BatchRow next;
    next.exists = begin_ < end_;
    next.begin = first_ + begin_;
    next.row = __shfl_sync(kAllLanes, row_, begin_ & 31);
    next.bag = __shfl_sync(kAllLanes, bag_, begin_ & 31);
    next.weight = __shfl_sync(kAllLanes, weight_, begin_ & 31);
    heads_ &= heads_ - 1;
    const int end = NextHead();
    next.count = next.exists ? end - begin_ : 0;
    next.is_long = next.count > kDensePiece;
    begin_ = end;
    return next;
  }

 private:
  // Bit i: a row begins at position `from` + i, or there is none.
  __device__ __forceinline__ unsigned HeadsAt(const TablePlan& plan, uint32_t from) const {
    const uint32_t i = from + threadIdx.x % 32;
    return __ballot_sync(kAllLanes, i == 0 || i >= n_ || plan.Row(i) != plan.Row(i - 1));
  }
  __device__ __forceinline__ int NextHead() const { return heads_ == 0 ? after_ : __ffs(static_cast<int>(heads_)) - 1; }

  uint32_t n_, first_;
  // Of this lane's position.
  int64_t row_ = 0;
  int32_t bag_ = 0;
  float weight_ = 1.0f;

  unsigned heads_ = 0;  // of the warp's positions from first_ on, those before begin_ left out
  int after_ = 0;       // the first head behind all of them
  int begin_ = 0, end_ = 0;
};

// The gradient of a row: the sum over its positions, or, of a long one, over what earlier launches made of them.
template <int V>
struct RowSum {
  const GradientSource& from;
  const BatchRow& row;

  // Every lane of the warp must call this.
  __device__ __forceinline__ Packet<float, V> operator()(int column) const {
    const bool several = __any_sync(kAllLanes, row.count > 1);
    Packet<float, V> sum{};
    if (row.count == 0 || column >= from.dim) return sum;
    if (!several) {
      const Packet<float, V> value = from.At<V>(row.bag, column);
      for (int v = 0; v < V; ++v) sum.x[v] += row.weight * value.x[v];
      return sum;
    }
    if (row.is_long) return Pieces(column);
    uint32_t begin = row.begin;
#pragma unroll 1
    for (int left = row.count; left > 0; left -= kBatch, begin += kBatch)
      AddPositions<kBatch>(from, begin, left, column, &sum);
    return sum;
  }

 private:
  // Most rows are read once or a few times; more rows under way would take registers from all of them.
  static constexpr int kBatch = 4;

  __device__ __forceinline__ Packet<float, V> Pieces(int column) const {
    const auto place = static_cast<int32_t>(from.plan.LongRowPlace(row.begin));
    const MorePieces more = from.plan.more[place];
    const float* const partial = from.plan.partial + column;
    Packet<float, V> sum{};
#pragma unroll 1
    for (int i = 0; i <= more.count; i += kBatch) {
      Packet<float, V> value[kBatch] = {};
      for (int j = 0; j < kBatch; ++j) {
        const int64_t piece = i + j == 0 ? place : more.first + i + j - 1;
        if (i + j <= more.count) value[j] = LoadPacket<V>(partial + piece * from.dim);
      }
      // In pairs, so that a sum of many pieces has few additions one after the other.
#pragma unroll
      for (int step = 1; step < kBatch; step *= 2)
        for (int j = 0; j < kBatch; j += 2 * step)
          for (int v = 0; v < V; ++v) value[j].x[v] += value[j + step].x[v];
      for (int v = 0; v < V; ++v) sum.x[v] += value[0].x[v];
    }
    return sum;
  }
};

template <int V, typename Sink>
constexpr int kRowBlocks = Sink::Blocks(V);

template <int V, typename Sink>
__global__ void __launch_bounds__(kDenseThreads, kRowBlocks<V, Sink>)
    SumRows(const __grid_constant__ TableList<GradientTable> tables, const __grid_constant__ DensePlan all) {
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const TablePlan plan = all.Of(table);
  const GradientSource from(table, plan);
  const RowLanes lanes = RowLanes::For(from.dim, V);
  const bool refused = plan.Refused();
  const Sink sink(table, plan);
  if (block.index == 0 && threadIdx.x == 0) sink.Finish(refused);
  if (refused || sink.Skips()) return;
  RunRows rows(from, lanes, RunOfLanes(all.positions, lanes), block.index, table.batch.num_embeddings);
  while (rows.Any()) {
    const BatchRow next = rows.Next();
    sink.template Row<V>(lanes, next.row, from.dim, next.exists, RowSum<V>{from, next});
  }
}

using RowsLaunch = KernelLaunch<TableList<GradientTable>, DensePlan>;

template <int V, typename Sink>
constexpr RowsLaunch kSumRows = LaunchKernel<SumRows<V, Sink>, kDenseThreads, 0>;

// Adds one of these kernels, for V columns at a time, on the tables that takes(table) chooses.
template <typename Takes>
void AddSumRows(RowsLaunch launch, int V, Takes takes, const DensePlan& plan, GradientLaunches& launches) {
  launches.Add(
      takes,
      [V, positions = plan.positions](const GradientTable& table) {
        const RowLanes lanes = RowLanes::For(table.batch.dim, V);
        const int run = RunOfLanes(positions, lanes);
        // Even a table without positions is told the end.
        return std::max<int64_t>(lanes.blocks((table.batch.n() + run - 1) / run), 1);
      },
      [plan, launch](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
        return LaunchStatus(launch(stream, on.blocks, on.tables, plan));
      });
}

}  // namespace jax_tt
