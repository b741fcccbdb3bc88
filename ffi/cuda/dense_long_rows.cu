#include <algorithm>

#include "ffi/cuda/dense_long_rows.h"
#include "ffi/cuda/dense_sum.h"

namespace jax_tt {
namespace {

constexpr int kLongRowThreads = 512;
// Blocks that share the long rows of all tables: a few for every multiprocessor.
constexpr int64_t kLongRowBlocks = 512;

// A row with positions in fewer tiles than this is never long.
constexpr int64_t kTilesOfLongRow = 3;

// Positions at the beginning of a tile that belong to a long row from an earlier tile.
__device__ __forceinline__ int PartOf(const TablePlan& plan, uint32_t tile) {
  const uint32_t heads = plan.head[tile];
  if (tile == 0 || (heads & 1) != 0 || plan.bag[tile * kDenseTile] < 0) return 0;
  // The row is long when two tiles in a row have no head, this one or neighbours.
  const bool before = plan.head[tile - 1] == 0, here = heads == 0;
  if (!(before ? here || plan.head[tile - 2] == 0 : here && plan.head[tile + 1] == 0)) return 0;
  return here ? kDenseTile : __ffs(static_cast<int>(heads)) - 1;
}

// Where a long row begins in a tile, or -1.
__device__ __forceinline__ int32_t LongRowIn(const TablePlan& plan, uint32_t tile) {
  const uint32_t heads = plan.head[tile];
  if (heads == 0 || plan.head[tile + 1] != 0 || plan.head[tile + 2] != 0) return -1;
  const auto position = static_cast<int32_t>(tile * kDenseTile) + 31 - __clz(static_cast<int>(heads));
  return plan.bag[position] < 0 ? -1 : position;
}

// The lanes of a row take a tile: they sum its part of a long row, and list the long row that begins in it.
template <int V>
__global__ void __launch_bounds__(kDenseThreads)
    SumParts(const __grid_constant__ TableList<GradientTable> tables, const __grid_constant__ DensePlan all) {
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const TablePlan plan = all.Of(table);
  const GradientSource from(table, plan);
  const RowLanes lanes = RowLanes::For(from.dim, V);
  if (lanes.row(block.index) >= plan.tiles) return;
  const auto tile = static_cast<uint32_t>(lanes.row(block.index));
  if (lanes.lane() == 0)
    if (const int32_t begin = LongRowIn(plan, tile); begin >= 0)
      plan.long_row[atomicAdd(plan.flags + kLongRows, 1)] = begin;
  const PositionSum<V> sum{from, tile * kDenseTile, PartOf(plan, tile)};
  if (sum.count == 0) return;
  float* partial = plan.partial + static_cast<int64_t>(tile) * from.dim;
  for (int column = lanes.lane() * V; column < from.dim; column += lanes.count * V)
    StorePacket(sum(column), partial + column);
}

// The gradient of one long row: the positions in the tile where it begins, then what SumParts made of its other tiles.
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

// Blocks take the listed rows of their table in turn.
template <int V>
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
  const int32_t count = plan.flags[kLongRows];
  for (int64_t k = block.index; k < count; k += block.count) {
    const int begin = plan.long_row[k], tile = begin / kDenseTile;
    const int last = TileOfNextRow(plan, tile + kTilesOfLongRow, found);
    // The row reaches into the tile where the next one begins, unless that one begins it.
    const int end_tile = (plan.head[last] & 1) != 0 ? last : last + 1;
    const LongRowSum<V> sum{from,     lanes,   words, static_cast<uint32_t>(begin), kDenseTile - begin % kDenseTile,
                            tile + 1, end_tile};
    float* total = LongRowTotal(plan, static_cast<uint32_t>(tile), from.dim);
    for (int first = 0; first < from.dim; first += lanes.count * V) {
      const int column = first + lanes.lane() * V;
      const Packet<float, V> value = sum(column);
      if (static_cast<int>(threadIdx.x) < lanes.count && column < from.dim) StorePacket(value, total + column);
    }
  }
}

template <int V>
void AddLongRowsOfWidth(const DensePlan& plan, GradientLaunches& launches) {
  const auto takes = [](const GradientTable& table) {
    return TilesOf(table) >= kTilesOfLongRow && table.widths.four_wide == (V == 4);
  };
  launches.Add(
      takes, [](const GradientTable& table) { return RowLanes::For(table.batch.dim, V).blocks(TilesOf(table)); },
      [plan](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
        return Launch(stream, on.blocks, kDenseThreads, 0, SumParts<V>, on.tables, plan);
      });
  launches.Add(
      takes,
      [plan](const GradientTable& table) {
        const int64_t tiles = TilesOf(table), share = kLongRowBlocks * tiles / plan.tiles;
        return std::clamp<int64_t>(tiles / 2, 1, share + 1);
      },
      [plan](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
        constexpr size_t kShared = SharedBytes<int32_t>(1) + SharedBytes<float>(kLongRowThreads * V);
        return Launch(stream, on.blocks, kLongRowThreads, kShared, SumLongRows<V>, on.tables, plan);
      });
}

}  // namespace

void AddLongRows(const DensePlan& plan, GradientLaunches& launches) {
  AddLongRowsOfWidth<4>(plan, launches);
  AddLongRowsOfWidth<1>(plan, launches);
}

}  // namespace jax_tt
