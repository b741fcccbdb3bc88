// The gradients of the rows of a batch, handed to a sink that stores or applies them.
//
// A sink is made for the table of a block, Sink(table, plan), and called with a row and with sum(column), the gradient
// of the V columns from there on:
//   template <int V>
//   void Row(const RowLanes& lanes, int64_t row, int dim, bool owner, const RowSum<V>& sum) const;
// Every lane of the warp calls Row; only lanes with `owner` set have a row to write.  One thread of each table calls
// Finish.
#ifndef JAX_TT_CUDA_DENSE_ROWS_H_
#define JAX_TT_CUDA_DENSE_ROWS_H_

#include <stdint.h>

#include <algorithm>

#include "ffi/cuda/dense_long_rows.h"
#include "ffi/cuda/dense_sum.h"
#include "ffi/cuda/kernel_launch.h"

namespace jax_tt {

// The gradient of a row: the sum over its positions, or what AddLongRows made of them.
template <int V>
struct RowSum {
  const PositionSum<V> positions;
  const float* total;  // [dim], or null

  __device__ __forceinline__ Packet<float, V> operator()(int column) const {
    if (total == nullptr) return positions(column);
    return column < positions.from.dim ? LoadPacket<V>(total + column) : Packet<float, V>{};
  }
};

// The row that begins at a sorted position.
struct BatchRow {
  bool exists = false;
  int64_t row = 0;
  int count = 0;  // of positions, or 0 for a long row
};

__device__ __forceinline__ BatchRow RowAt(const TablePlan& plan, uint32_t i) {
  if (i >= plan.n) return {};
  const uint32_t tile = i / kDenseTile, bit = i % kDenseTile;
  // All three are asked for at once: most positions need them, and one wait is shorter than three.
  const uint32_t heads = plan.head[tile];
  const int32_t bag = plan.bag[i];
  const int64_t row = plan.row[i];
  if (((heads >> bit & 1) == 0) | (bag < 0)) return {};
  uint32_t next = tile, above = heads & ~((2u << bit) - 1);
  while (above == 0 && next < tile + 2) above = plan.head[++next];
  if (above == 0) return {true, row, 0};
  return {true, row, static_cast<int>(next * kDenseTile - i) + __ffs(static_cast<int>(above)) - 1};
}

// The lanes of a row take one sorted position; only those where a row begins have work.
template <int V, typename Sink>
__global__ void __launch_bounds__(kDenseThreads)
    SumRows(const __grid_constant__ TableList<GradientTable> tables, const __grid_constant__ DensePlan all) {
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const TablePlan plan = all.Of(table);
  const GradientSource from(table, plan);
  const RowLanes lanes = RowLanes::For(from.dim, V);
  const uint32_t i = static_cast<uint32_t>(min(lanes.row(block.index), plan.n));
  const BatchRow found = RowAt(plan, i);
  const Sink sink(table, plan);
  if (block.index == 0 && threadIdx.x == 0) sink.Finish();
  if (!__any_sync(kAllLanes, found.exists)) return;
  const bool is_long = found.exists && found.count == 0;
  const float* total = is_long ? LongRowTotal(plan, i / kDenseTile, from.dim) : nullptr;
  sink.template Row<V>(lanes, found.row, from.dim, found.exists,
                       RowSum<V>{PositionSum<V>{from, i, found.count}, total});
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
