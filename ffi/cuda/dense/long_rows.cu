#include <algorithm>

#include "ffi/cuda/dense/long_rows.h"
#include "ffi/cuda/dense/sum.h"

namespace jax_tt {
namespace {

constexpr int kLongRowThreads = 512;
constexpr int kBatch = 8;  // positions or pieces that a thread asks for at once
// Blocks that share the long rows of all tables: a few for every multiprocessor.
constexpr int64_t kLongRowBlocks = 512;

// The first sorted position from `begin` on, before `end`, where another row begins; sorted[begin - 1] is the row that
// is looked for.
__device__ __forceinline__ int64_t EndOf(const TablePlan& plan, int64_t row, int64_t begin, int64_t end) {
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (plan.Row(middle) <= row)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// Positions at the beginning of a piece that belong to a long row from an earlier one.
__device__ __forceinline__ int PartOf(const TablePlan& plan, int64_t piece, int64_t num_embeddings) {
  const int64_t first = piece * kDensePiece;
  if (first == 0) return 0;
  const int64_t row = plan.Row(first);
  if (row == num_embeddings || plan.Row(first - 1) != row) return 0;
  const int64_t end = EndOf(plan, row, first + 1, min(first + kDensePiece, plan.n));
  // It begins in the piece before, or is longer than that one.
  const int64_t begin = EndOf(plan, row - 1, first - kDensePiece, first);
  const bool is_long = end - begin > kDensePiece || (begin > 0 && plan.Row(begin - 1) == row) ||
                       (begin + kDensePiece < plan.n && plan.Row(begin + kDensePiece) == row);
  return is_long ? static_cast<int>(end - first) : 0;
}

// Where a long row begins in a piece, or -1: it is the row at the end of the piece.
__device__ __forceinline__ int64_t LongRowIn(const TablePlan& plan, int64_t piece, int64_t num_embeddings) {
  const int64_t first = piece * kDensePiece, behind = first + kDensePiece;
  if (behind >= plan.n) return -1;
  const int64_t row = plan.Row(behind);
  if (row == num_embeddings || plan.Row(behind - 1) != row) return -1;
  const int64_t begin = EndOf(plan, row - 1, first, behind);
  if (begin == first && first > 0 && plan.Row(first - 1) == row) return -1;
  return begin + kDensePiece < plan.n && plan.Row(begin + kDensePiece) == row ? begin : -1;
}

// The lanes of a row take a piece: they sum its part of a long row, and list the long row that begins in it.
template <int V>
__global__ void __launch_bounds__(kDenseThreads, 3)
    SumParts(const __grid_constant__ TableList<GradientTable> tables, const __grid_constant__ DensePlan all) {
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const TablePlan plan = all.Of(table);
  const GradientSource from(table, plan);
  const RowLanes lanes = RowLanes::For(from.dim, V);
  const int64_t piece = lanes.row(block.index);
  if (plan.Refused() || piece >= plan.pieces) return;
  if (lanes.lane() == 0)
    if (const int64_t begin = LongRowIn(plan, piece, table.batch.num_embeddings); begin >= 0)
      plan.long_row[atomicAdd(plan.flags + kLongRows, 1)] = static_cast<int32_t>(begin);
  const PositionSum<kBatch, V> sum{from, static_cast<uint32_t>(piece * kDensePiece),
                                   PartOf(plan, piece, table.batch.num_embeddings)};
  if (sum.count == 0) return;
  float* partial = plan.partial + piece * from.dim;
  for (int column = lanes.lane() * V; column < from.dim; column += lanes.count * V)
    StorePacket(sum(column).Value(), partial + column);
}

// The gradient of one long row: the positions in the piece where it begins, then what SumParts made of its other
// pieces.  The groups of lanes take equal runs of both, and their sums are added in order.  Every thread of the block
// must call it.
template <int V>
struct LongRowSum {
  const GradientSource& from;
  const RowLanes& lanes;
  Shared<float> words;   // of SumOverTeam
  uint32_t begin;        // sorted position
  int count;             // of positions in the first piece
  int piece, end_piece;  // the other pieces

  __device__ __forceinline__ Packet<float, V> operator()(int column) const {
    const int groups = kLongRowThreads / lanes.count, group = static_cast<int>(threadIdx.x) / lanes.count;
    const int positions = (count + groups - 1) / groups, pieces = (end_piece - piece + groups - 1) / groups;
    const int first = min(count, group * positions), first_piece = min(end_piece, piece + group * pieces);
    ExactPacketSum<V> sum = PositionSum<kBatch, V>{from, begin + first, min(positions, count - first)}(column);
    if (column < from.dim) AddPieces<kBatch>(from, first_piece, min(pieces, end_piece - first_piece), column, &sum);
    return SumOverTeam(lanes, kLongRowThreads / 32, sum.Value(), words);
  }
};

// The first piece from `piece` on whose last position another row has, or the number of pieces.  Every thread of the
// block must call this.
__device__ __forceinline__ int PieceOfEnd(const TablePlan& plan, int64_t row, int piece, Shared<int32_t> found) {
  if (threadIdx.x == 0) found[0] = static_cast<int32_t>(plan.pieces);
  __syncthreads();
  for (;; piece += kLongRowThreads) {
    const int64_t mine = piece + static_cast<int>(threadIdx.x);
    const bool ends = mine < plan.pieces && plan.Row(min((mine + 1) * kDensePiece, plan.n) - 1) != row;
    if (ends) atomicMin(found, static_cast<int32_t>(mine));
    if (__syncthreads_or(ends) || piece + kLongRowThreads >= plan.pieces) break;
  }
  const int32_t nearest = found[0];
  __syncthreads();
  return nearest;
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
    const int begin = plan.long_row[k], piece = begin / kDensePiece;
    const int64_t row = plan.Row(begin);
    const int last = PieceOfEnd(plan, row, piece + 1, found);
    // The row reaches into the piece where it ends, unless the next one begins it.
    const bool reaches = last < plan.pieces && plan.Row(static_cast<int64_t>(last) * kDensePiece) == row;
    const LongRowSum<V> sum{from,
                            lanes,
                            words,
                            static_cast<uint32_t>(begin),
                            (piece + 1) * kDensePiece - begin,
                            piece + 1,
                            reaches ? last + 1 : last};
    const uint32_t place = plan.LongRowPlace(static_cast<uint32_t>(begin));
    if (threadIdx.x == 0) plan.more[place] = {0, 0};
    float* total = plan.partial + static_cast<int64_t>(place) * from.dim;
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
    return !SplitsRows(table) && table.batch.n() > kDensePiece && table.widths.four_wide == (V == 4);
  };
  const auto pieces = [](const GradientTable& table) { return (table.batch.n() + kDensePiece - 1) / kDensePiece; };
  launches.Add(
      takes, [pieces](const GradientTable& table) { return RowLanes::For(table.batch.dim, V).blocks(pieces(table)); },
      [plan](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
        return Launch(stream, on.blocks, kDenseThreads, 0, SumParts<V>, on.tables, plan);
      });
  launches.Add(
      takes,
      [=](const GradientTable& table) {
        const int64_t share = kLongRowBlocks * pieces(table) / plan.pieces;
        return std::clamp<int64_t>(pieces(table) / 2, 1, share + 1);
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
