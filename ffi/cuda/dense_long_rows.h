// Gradients of rows that very many positions read, a block for each.
#ifndef JAX_TT_CUDA_DENSE_LONG_ROWS_H_
#define JAX_TT_CUDA_DENSE_LONG_ROWS_H_

#include "ffi/cuda/dense_sum.h"

namespace jax_tt {

constexpr int kLongRowThreads = 512;
// Blocks that share the long rows of all tables: a few for every multiprocessor.
constexpr int64_t kLongRowBlocks = 512;

// The gradient of one long row: the positions in the tile where it begins, then what SumRows made of its other tiles.
// The groups of lanes take equal runs of both, and their sums are added in order.  Every thread of the block must call
// it.
template <int V>
struct LongRowSum {
  const GradientSource& from;
  const RowLanes& lanes;
  Shared<float> words;  // of SumOverBlock
  uint32_t begin;       // sorted position
  int count;            // of positions in the first tile
  int tile, end_tile;   // the other tiles

  __device__ __forceinline__ Packet<float, V> operator()(int column) const {
    const int groups = kLongRowThreads / lanes.count, group = static_cast<int>(threadIdx.x) / lanes.count;
    const int positions = (count + groups - 1) / groups, tiles = (end_tile - tile + groups - 1) / groups;
    const int first = min(count, group * positions), first_tile = min(end_tile, tile + group * tiles);
    Packet<float, V> sum = PositionSum<V>{from, begin + first, min(positions, count - first)}(column);
    if (column < from.dim) AddTiles(first_tile, min(end_tile, first_tile + tiles), column, &sum);
    return SumOverBlock(lanes, sum, words);
  }

 private:
  __device__ __forceinline__ void AddTiles(int i, int last, int column, Packet<float, V>* sum) const {
    constexpr int kBatch = 8;
    const float* partial = from.plan.partial + column;
    for (; i < last; i += kBatch) {
      Packet<float, V> value[kBatch] = {};
      for (int j = 0; j < kBatch; ++j)
        if (i + j < last) value[j] = LoadPacket<V>(partial + static_cast<int64_t>(i + j) * from.dim);
      for (int j = 0; j < kBatch; ++j)
        for (int v = 0; v < V; ++v) sum->x[v] += value[j].x[v];
    }
  }
};

// The first tile from `tile` on in which a row begins.  Every thread of the block must call this.
__device__ __forceinline__ int TileOfNextRow(const TablePlan& plan, int tile, Shared<int32_t> found) {
  if (threadIdx.x == 0) found[0] = INT32_MAX;
  __syncthreads();
  for (;; tile += kLongRowThreads) {
    const int mine = tile + static_cast<int>(threadIdx.x);
    if (mine <= plan.tiles && plan.head[mine] != 0) atomicMin(found, mine);
    __syncthreads();
    const int32_t nearest = found[0];
    __syncthreads();
    if (nearest != INT32_MAX) return nearest;
  }
}

// Blocks take the listed rows of their table in turn.  The first of them also tells the sink that all is done.
template <int V, typename Sink>
__global__ void __launch_bounds__(kLongRowThreads, 1)
    SumLongRows(const __grid_constant__ TableList<GradientTable> tables, const __grid_constant__ DensePlan all) {
  SharedArena arena;
  const Shared<int32_t> found = arena.Take<int32_t>(1);
  const Shared<float> words = arena.Take<float>(kLongRowThreads * V);
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const TablePlan plan = all.Of(table);
  const GradientSource from(table, plan);
  const RowLanes lanes = RowLanes::For(from.dim, V);
  const Sink sink(table, plan);
  const int32_t count = plan.flags[kLongRows];
  for (int64_t k = block.index; k < count; k += block.count) {
    const int begin = plan.long_row[k], tile = begin / kDenseTile;
    const int last = TileOfNextRow(plan, tile + 3, found);
    // The row reaches into the tile where the next one begins, unless that one begins it.
    const int end_tile = (plan.head[last] & 1) != 0 ? last : last + 1;
    sink.template Row<V>(lanes, plan.row[begin], from.dim, threadIdx.x < static_cast<unsigned>(lanes.count),
                         LongRowSum<V>{from, lanes, words, static_cast<uint32_t>(begin),
                                       kDenseTile - begin % kDenseTile, tile + 1, end_tile});
  }
  if (block.index == 0 && threadIdx.x == 0) sink.Finish();
}

// Adds what hands every row of the tables that takes(table) chooses to a sink.
template <int V, typename Sink, typename Takes>
void AddSumOfRows(const DensePlan& plan, Takes takes, GradientLaunches& launches) {
  launches.Add(
      takes, [](const GradientTable& table) { return RowLanes::For(table.batch.dim, V).blocks(table.batch.n()); },
      [plan](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
        return Launch(stream, on.blocks, kDenseThreads, 0, SumRows<V, Sink>, on.tables, plan);
      });
  launches.Add(
      takes,
      [plan](const GradientTable& table) {
        // A row is long from 64 positions on at the earliest, and even without any of those the sink is told the end.
        const int64_t tiles = TilesOf(table), share = kLongRowBlocks * tiles / plan.tiles;
        return std::clamp<int64_t>(tiles / 2, 1, share + 1);
      },
      [plan](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
        constexpr size_t kShared = SharedBytes<int32_t>(1) + SharedBytes<float>(kLongRowThreads * V);
        return Launch(stream, on.blocks, kLongRowThreads, kShared, SumLongRows<V, Sink>, on.tables, plan);
      });
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_LONG_ROWS_H_
