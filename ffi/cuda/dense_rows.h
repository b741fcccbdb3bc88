// The gradients of the rows of a batch, handed to a sink that stores or applies them.
//
// A sink is made for the table of a block, Sink(table, plan), and called with a row and with sum(column), the gradient
// of the V columns from there on:
//   template <int V>
//   void Row(const RowLanes& lanes, int64_t row, int dim, bool owner, const RowSum<V>& sum) const;
//   static constexpr int Blocks(int V);
// Blocks(V) are on a multiprocessor at the same time, at least; for more of them registers would have to be spilled.
// Every lane of the warp calls Row; only lanes with `owner` set have a row to write.  One thread of each table calls
// Finish, and says whether the batch reads no row because something is wrong with it.
#ifndef JAX_TT_CUDA_DENSE_ROWS_H_
#define JAX_TT_CUDA_DENSE_ROWS_H_

#include <stdint.h>

#include <algorithm>

#include "ffi/cuda/dense_sum.h"
#include "ffi/cuda/kernel_launch.h"

namespace jax_tt {

// The row that begins at a sorted position.
struct BatchRow {
  bool exists = false;
  bool is_long = false;
  uint32_t begin = 0;
  int64_t row = 0;
  int count = 0;  // of positions; of no use for a long row
};

// The lanes of a row take one sorted position: the row that begins there.  Every lane of the warp must call this.
__device__ __forceinline__ BatchRow RowOfLanes(const TablePlan& plan, const RowLanes& lanes, int64_t block,
                                               int64_t num_embeddings) {
  // The warp looks from its first position on.
  const int lane = static_cast<int>(threadIdx.x) % 32, own = lane >> (__ffs(lanes.count) - 1);
  const int64_t begin = lanes.row(block), first = begin - own;
  if (first >= plan.n) return {};
  // Bit i: a row begins at position `from` + i, or there is none.
  const auto heads_at = [&](int64_t from) {
    const int64_t i = from + lane;
    return __ballot_sync(kAllLanes, i == 0 || i >= plan.n || plan.Row(i) != plan.Row(i - 1));
  };
  unsigned heads = heads_at(first);
  const int64_t row = plan.Row(min(begin, plan.n - 1));
  BatchRow found;
  found.exists = begin < plan.n && (heads >> own & 1) != 0 && row < num_embeddings;
  found.row = row;
  found.begin = static_cast<uint32_t>(begin);
  heads &= ~((2u << own) - 1);
  int behind = 0;
  // Most rows end among the positions that the warp has seen.
  constexpr int kMost = kDensePiece + 1;
#pragma unroll 1
  for (int looked = 32; looked < 31 + kMost && __any_sync(kAllLanes, found.exists && heads == 0); looked += 32) {
    const unsigned next = heads_at(first + looked);
    if (heads != 0) continue;
    heads = next;
    behind = looked;
  }
  found.count = heads == 0 ? kMost : behind + __ffs(static_cast<int>(heads)) - 1 - own;
  found.is_long = found.count > kDensePiece;
  return found;
}

// The gradient of a row: the sum over its positions, or, of a long one, over what earlier launches made of them.  Both
// are sums of vectors, so that the code is there once.
template <int V>
struct RowSum {
  const GradientSource& from;
  uint32_t begin;
  int count;
  bool is_long;
  int32_t place = 0, first_more = 0;  // of pieces

  __device__ __forceinline__ RowSum(const GradientSource& from, const BatchRow& row)
      : from(from), begin(row.begin), count(row.exists ? row.count : 0), is_long(row.exists && row.is_long) {
    if (!is_long) return;
    place = static_cast<int32_t>(from.plan.LongRowPlace(begin));
    const MorePieces more = from.plan.more[place];
    first_more = more.first;
    count = more.count + 1;
  }

  __device__ __forceinline__ Packet<float, V> operator()(int column) const {
    // Most rows are read once or a few times; more rows under way would take registers from all of them.
    constexpr int kBatch = 4;
    Packet<float, V> sum{};
    if (column >= from.dim) return sum;
#pragma unroll 1
    for (int i = 0; i < count; i += kBatch) {
      const float* at[kBatch] = {};
      float weight[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        weight[j] = 1.0f;
        if (i + j < count) at[j] = VectorAt(i + j, &weight[j]);
      }
      Packet<float, V> value[kBatch] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (i + j < count) value[j] = LoadVector<V>(at[j] + column, from.table.widths.vectors_aligned);
      if (is_long) {
        // In pairs, so that a sum of many pieces has few additions one after the other.
#pragma unroll
        for (int step = 1; step < kBatch; step *= 2)
          for (int j = 0; j < kBatch; j += 2 * step)
            for (int v = 0; v < V; ++v) value[j].x[v] += value[j + step].x[v];
        for (int v = 0; v < V; ++v) sum.x[v] += value[0].x[v];
        continue;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        for (int v = 0; v < V; ++v)
          if (i + j < count) sum.x[v] += weight[j] * value[j].x[v];
    }
    return sum;
  }

 private:
  __device__ __forceinline__ const float* VectorAt(int k, float* weight) const {
    if (is_long) return from.plan.partial + static_cast<int64_t>(k == 0 ? place : first_more + k - 1) * from.dim;
    if (from.weighted) *weight = from.plan.weight[begin + k];
    return from.table.out_gradient + from.table.vectors.at(from.plan.bag[begin + k], from.dim);
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
  const BatchRow found = RowOfLanes(plan, lanes, block.index, table.batch.num_embeddings);
  const Sink sink(table, plan);
  if (block.index == 0 && threadIdx.x == 0) sink.Finish(refused);
  if (refused || !__any_sync(kAllLanes, found.exists)) return;
  sink.template Row<V>(lanes, found.row, from.dim, found.exists, RowSum<V>(from, found));
}

using RowsLaunch = KernelLaunch<TableList<GradientTable>, DensePlan>;

template <int V, typename Sink>
constexpr RowsLaunch kSumRows = LaunchKernel<SumRows<V, Sink>, kDenseThreads, 0>;

// Adds one of these kernels, for V columns at a time, on the tables that takes(table) chooses.
template <typename Takes>
void AddSumRows(RowsLaunch launch, int V, Takes takes, const DensePlan& plan, GradientLaunches& launches) {
  launches.Add(
      takes,
      [V](const GradientTable& table) {
        // Even a table without positions is told the end.
        return std::max<int64_t>(RowLanes::For(table.batch.dim, V).blocks(table.batch.n()), 1);
      },
      [plan, launch](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
        return LaunchStatus(launch(stream, on.blocks, on.tables, plan));
      });
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_ROWS_H_
