// Gradients of the rows of a batch, summed in a fixed order and handed to a sink that stores or applies them.
//
// A sink is made for the table of a block, Sink(table, plan), and called with a row and with sum(column), the gradient
// of the V columns from there on:
//   template <int V, typename Sum>
//   void Row(const RowLanes& lanes, int64_t row, int dim, bool owner, const Sum& sum) const;
// Every lane of the warp calls Row, and Row calls sum equally often in every lane; only lanes with `owner` set have a
// row to write.  Sink::SumsParts(table) tells whether the parts of long rows are to be summed, or else they have been.
#ifndef JAX_TT_CUDA_DENSE_SUM_H_
#define JAX_TT_CUDA_DENSE_SUM_H_

#include <stdint.h>

#include <algorithm>

#include "ffi/cuda/dense_sort.h"
#include "ffi/cuda/dense_vectors.h"

namespace jax_tt {

// What gradients are summed from.
struct GradientSource {
  const GradientTable& table;
  const TablePlan& plan;
  int dim;
  bool weighted;

  __device__ __forceinline__ GradientSource(const GradientTable& table, const TablePlan& plan)
      : table(table), plan(plan), dim(static_cast<int>(table.batch.dim)), weighted(table.batch.weights != nullptr) {}
  // The gradient of the vector of a bag.
  template <int V>
  __device__ __forceinline__ Packet<float, V> At(int32_t bag, int column) const {
    return LoadVector<V>(table.out_gradient + table.vectors.at(bag, dim) + column, table.widths.vectors_aligned);
  }
};

// Adds kBatch rows of the output gradient, or the first `count` of them; all are asked for before the first is added.
template <int kBatch, int V>
__device__ __forceinline__ void AddPositions(const GradientSource& from, uint32_t begin, int count, int column,
                                             Packet<float, V>* sum) {
  int32_t bag[kBatch] = {};
  float weight[kBatch] = {};
  Packet<float, V> value[kBatch] = {};
  for (int j = 0; j < kBatch; ++j) {
    if (j >= count) continue;
    bag[j] = from.plan.bag[begin + j];
    weight[j] = from.weighted ? from.plan.weight[begin + j] : 1.0f;
  }
  for (int j = 0; j < kBatch; ++j)
    if (j < count) value[j] = from.At<V>(bag[j], column);
  for (int j = 0; j < kBatch; ++j)
    for (int v = 0; v < V; ++v)
      if (j < count) sum->x[v] += weight[j] * value[j].x[v];
}

// The sum over `count` sorted positions, in their order.
template <int V>
struct PositionSum {
  const GradientSource& from;
  uint32_t begin;
  int count;

  __device__ __forceinline__ Packet<float, V> operator()(int column) const {
    // Most rows are read once or a few times; more rows under way would take registers from all of them.
    constexpr int kBatch = 4;
    Packet<float, V> sum{};
    if (column >= from.dim) return sum;
    uint32_t i = begin;
    for (int left = count; left > 0; left -= kBatch, i += kBatch) AddPositions<kBatch>(from, i, left, column, &sum);
    return sum;
  }
};

// What the lanes at sorted position i have to do.  A row that ends in the second tile after the one where it begins,
// or before, is summed where it begins.  A longer one is cut at the tiles, so that as many lanes share it.
struct Segment {
  enum Kind { kNone, kRow, kPart, kLongRow };
  Kind kind = kNone;
  int count = 0;  // of positions
  int64_t row = 0;
};

// Sorted positions from i to the first of these heads.
__device__ __forceinline__ int CountTo(uint32_t i, uint32_t tile, uint32_t heads) {
  return static_cast<int>(tile * kDenseTile - i) + __ffs(static_cast<int>(heads)) - 1;
}

__device__ __forceinline__ Segment SegmentAt(const TablePlan& plan, uint32_t i) {
  if (i >= plan.n) return {};
  const uint32_t tile = i / kDenseTile, bit = i % kDenseTile;
  // All three are asked for at once: most positions need them, and one wait is shorter than three.
  const uint32_t heads = plan.head[tile];
  const int32_t bag = plan.bag[i];
  const int64_t row = plan.row[i];
  const bool head = (heads >> bit & 1) != 0;
  if ((!head & (bit != 0)) | (bag < 0)) return {};
  if (!head) {
    // The row began in an earlier tile.  It is long when two tiles in a row have no head, this one or neighbours.
    const bool before = plan.head[tile - 1] == 0, here = heads == 0;
    if (!(before ? here || plan.head[tile - 2] == 0 : here && plan.head[tile + 1] == 0)) return {};
    return {Segment::kPart, here ? kDenseTile : CountTo(i, tile, heads), row};
  }
  const uint32_t above = heads & ~((2u << bit) - 1);
  if (above != 0) return {Segment::kRow, CountTo(i, tile, above), row};
  for (uint32_t next = tile + 1; next <= tile + 2; ++next)
    if (const uint32_t word = plan.head[next]; word != 0) return {Segment::kRow, CountTo(i, next, word), row};
  return {Segment::kLongRow, 0, row};
}

// The lanes of a row take one sorted position; only those where a row or a part begins have work.
template <int V, typename Sink>
__global__ void __launch_bounds__(kDenseThreads)
    SumRows(const __grid_constant__ TableList<GradientTable> tables, const __grid_constant__ DensePlan all) {
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const TablePlan plan = all.Of(table);
  const GradientSource from(table, plan);
  const RowLanes lanes = RowLanes::For(from.dim, V);
  const uint32_t i = static_cast<uint32_t>(min(lanes.row(block.index), plan.n));
  Segment segment = SegmentAt(plan, i);
  if (segment.kind == Segment::kLongRow) {
    if (Sink::SumsParts(table) && lanes.lane() == 0)
      plan.long_row[atomicAdd(plan.flags + kLongRows, 1)] = static_cast<int32_t>(i);
    segment = {};
  }
  if (segment.kind == Segment::kPart && !Sink::SumsParts(table)) segment = {};
  if (!__any_sync(kAllLanes, segment.kind != Segment::kNone)) return;

  if (segment.kind == Segment::kPart) {
    const PositionSum<V> sum{from, i, segment.count};
    float* partial = plan.partial + static_cast<int64_t>(i / kDenseTile) * from.dim;
    for (int column = lanes.lane() * V; column < from.dim; column += lanes.count * V)
      StorePacket(sum(column), partial + column);
    segment = {};
  }
  const bool owner = segment.kind == Segment::kRow;
  const Sink sink(table, plan);
  sink.template Row<V>(lanes, segment.row, from.dim, owner, PositionSum<V>{from, i, segment.count});
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_SUM_H_
