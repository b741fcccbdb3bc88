// Sums of the rows of a bag.
#include <type_traits>
#include <utility>

#include "ffi/core/sentinel.h"
#include "ffi/cuda/dense/columns.h"
#include "ffi/cuda/dense/dense.h"
#include "ffi/cuda/dense/ids.h"
#include "ffi/cuda/dense/vectors.h"
#include "ffi/cuda/dense/widths.h"
#include "ffi/cuda/tables/launches.h"

namespace jax_tt {
namespace {

// Rows of a bag that are asked for before the first of them is added: a row comes from memory in several hundred
// cycles, whatever the number of rows under way.  The lanes of a block that share a bag have few each.
constexpr int kRowsInFlight = 8, kSharedRowsInFlight = 4;

// Positions of a bag that are summed in order, and those of a block where a bag, or the share that some lanes have of
// it, has more: the sums of blocks are added exactly.
constexpr uint32_t kShortBag = 256, kBagBlock = 32;

// Adds the rows of positions [begin, end), in their order; returns whether one of them makes NaN of its bag.  `levels`
// are those of the table where the launch has it: numbers select from them, which they cannot from registers.
// Positions of a call fit 32 bits.
template <typename T, int V, int kInFlight>
__device__ __forceinline__ bool AddRows(const ForwardTable& table, const PackedLevels& levels, uint32_t begin,
                                        uint32_t end, int column, Packet<float, V>* sum) {
  const DenseBatch& batch = table.batch;
  const IdRange ids(batch, batch.num_embeddings);
  bool poisoned = false;
  for (uint32_t position = begin; position < end; position += kInFlight) {
    int64_t row[kInFlight];
    LoadIds(batch, WholeIds{}, position, 1u, end - 1, row);
    unsigned reads = (1u << min(end - position, uint32_t{kInFlight})) - 1;
    if (!ids.Has(row)) {
      ids.Resolve(batch, batch.num_embeddings, row);
      for (int j = 0; j < kInFlight; ++j) {
        poisoned |= row[j] == kPoisonedRow;
        if (row[j] < 0) reads &= ~(1u << j);
      }
    }
    Columns<T, V> value[kInFlight] = {};
    float weight[kInFlight] = {};
    for (int j = 0; j < kInFlight; ++j) {
      if (!(reads >> j & 1)) continue;
      value[j] = Columns<T, V>::Load(table, row[j], column);
      weight[j] = batch.weights == nullptr ? 1.0f : batch.weights[position + j];
    }
    for (int j = 0; j < kInFlight; ++j) {
      if (!(reads >> j & 1)) continue;
      const Packet<float, V> numbers = value[j].Numbers(table, levels);
      for (int v = 0; v < V; ++v) sum->x[v] += weight[j] * numbers.x[v];
    }
  }
  return poisoned;
}

// The sum over positions [begin, end).
template <typename T, int V, int kInFlight>
__device__ __forceinline__ Packet<float, V> SumOfRows(const ForwardTable& table, const PackedLevels& levels,
                                                      uint32_t begin, uint32_t end, int column, bool* poisoned) {
  const uint32_t block = end - begin > kShortBag ? kBagBlock : kShortBag;
  ExactPacketSum<V> sum;
  for (; begin < end; begin += block) {
    Packet<float, V> part{};
    *poisoned |= AddRows<T, V, kInFlight>(table, levels, begin, min(end, begin + block), column, &part);
    sum.Add(part);
  }
  return sum.Value();
}

template <int V>
__device__ __forceinline__ void WriteSum(const ForwardTable& table, Packet<float, V> sum, bool poisoned, int64_t at) {
  if (poisoned)
    for (int v = 0; v < V; ++v) sum.x[v] = BitsToFloat(0x7fc00000u);
  StoreVector(sum, table.out + at, table.widths.vectors_aligned);
}

// Leaves a notice of an id of the bag that is out of range: reading the ids of the bag once more is cheap, they come
// from the cache when the rows are asked for.
__device__ __forceinline__ void NoteIds(const DenseBatch& batch, int64_t begin, int64_t end, int64_t first,
                                        int64_t stride) {
  if (batch.notice == nullptr) return;
  for (int64_t position = begin + first; position < end; position += stride)
    if (ResolveId(batch, position) == kNoticedRow)
      LeaveNotice(batch.notice, WrittenWholeId(batch.type, batch.ids, position, batch.padded), position);
}

// The lanes of a row take one bag, position after position.
template <typename T, int V, typename Tables>
__global__ void __launch_bounds__(kDenseThreads, 2) PoolRows(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const ForwardTable& found = tables.Find(&block);
  const ForwardTable table = found;
  const DenseBatch& batch = table.batch;
  const RowLanes lanes = RowLanes::For(batch.dim, V);
  const int64_t bag = lanes.row(block.index);
  if (bag >= batch.total_bags()) return;
  const BagRange range = PositionsOf(batch, bag);
  const bool broken = !range.valid || !SentinelHolds(*table.sentinel);
  const int64_t at = table.vectors.at(bag, batch.dim);
  NoteIds(batch, range.begin, range.end, lanes.lane(), lanes.count);
  for (int column = lanes.lane() * V; column < batch.dim; column += lanes.count * V) {
    bool poisoned = false;
    const Packet<float, V> sum =
        SumOfRows<T, V, kRowsInFlight>(table, found.levels, range.begin, range.end, column, &poisoned);
    WriteSum(table, sum, broken || poisoned, at + column);
  }
}

// A block takes one bag: its groups of lanes take equal runs of positions, and their sums are added in order.
template <typename T, int V, typename Tables>
__global__ void __launch_bounds__(kDenseThreads, 4) PoolRowsByBlock(const __grid_constant__ Tables tables) {
  SharedArena arena;
  const Shared<float> words = arena.Take<float>(kDenseThreads * V);
  BlockOfTable block;
  const ForwardTable& found = tables.Find(&block);
  const ForwardTable table = found;
  const DenseBatch& batch = table.batch;
  const RowLanes lanes = RowLanes::For(batch.dim, V);
  const int64_t bag = block.index;
  // The sentinel is asked for beside the offsets, not after them.
  const float sentinel = *table.sentinel;
  const BagRange range = PositionsOf(batch, bag);
  const bool broken = !range.valid || !SentinelHolds(sentinel);
  const int64_t at = table.vectors.at(bag, batch.dim);
  const int shift = __ffs(lanes.count) - 1, groups = kDenseThreads >> shift;
  const int group = static_cast<int>(threadIdx.x) >> shift;
  NoteIds(batch, range.begin, range.end, threadIdx.x, kDenseThreads);
  const int64_t run = static_cast<uint32_t>(range.end - range.begin + groups - 1) / static_cast<uint32_t>(groups);
  const int64_t begin = min(range.end, range.begin + group * run), end = min(range.end, begin + run);
  for (int first = 0; first < batch.dim; first += lanes.count * V) {
    const int column = first + lanes.lane() * V;
    Packet<float, V> sum{};
    bool poisoned = false;
    if (column < batch.dim)
      sum = SumOfRows<T, V, kSharedRowsInFlight>(table, found.levels, begin, end, column, &poisoned);
    const bool any_poisoned = __syncthreads_or(poisoned) != 0;
    sum = SumOverTeam(lanes, kDenseThreads / 32, sum, words);
    if (group == 0 && column < batch.dim) WriteSum(table, sum, broken || any_poisoned, at + column);
  }
}

// Whether so few bags are so long that the lanes of a row, a bag each, would leave most of the device idle: a block has
// all rows of a bag under way where the lanes of one row have a few after another.  Decided by sizes alone, so that
// equal calls give equal bits.
bool ByBlock(const DenseBatch& batch, const RowLanes& lanes) {
  constexpr int64_t kLongBag = 16, kManyThreads = 1 << 16;
  return batch.total_bags() * lanes.count < kManyThreads && batch.n() >= batch.total_bags() * kLongBag;
}

template <typename T, int V>
void AddPoolRows(TableLaunches<ForwardTable>& launches) {
  const auto takes = [](const ForwardTable& table) {
    return table.storage == kStorage<T> && table.widths.four_wide == (V == 4);
  };
  const auto lanes = [](const ForwardTable& table) { return RowLanes::For(table.batch.dim, V); };
  const auto by_block = [lanes](const ForwardTable& table) { return ByBlock(table.batch, lanes(table)); };
  launches.Add([=](const ForwardTable& table) { return takes(table) && !by_block(table); },
               [=](const ForwardTable& table) { return lanes(table).blocks(table.batch.total_bags()); },
               [](cudaStream_t stream, const TableLaunch<ForwardTable>& on) {
                 return on.Visit([&](const auto& tables) {
                   using Tables = std::decay_t<decltype(tables)>;
                   return Launch(stream, on.blocks, kDenseThreads, 0, PoolRows<T, V, Tables>, tables);
                 });
               });
  launches.Add([=](const ForwardTable& table) { return takes(table) && by_block(table); },
               [](const ForwardTable& table) { return table.batch.total_bags(); },
               [](cudaStream_t stream, const TableLaunch<ForwardTable>& on) {
                 return on.Visit([&](const auto& tables) {
                   using Tables = std::decay_t<decltype(tables)>;
                   return Launch(stream, on.blocks, kDenseThreads, SharedBytes<float>(kDenseThreads * V),
                                 PoolRowsByBlock<T, V, Tables>, tables);
                 });
               });
}

}  // namespace

Status DenseForward(cudaStream_t stream, std::vector<ForwardTable> tables, void* workspace) {
  for (ForwardTable& table : tables) {
    table.widths = WidthsOf(table, table.out, 0);
    if (table.storage == Storage::kPacked)
      table.widths.four_wide &= PackedRowBytes(table.batch.dim, table.bits) % sizeof(uint32_t) == 0;
  }
  TableLaunches<ForwardTable> launches(std::move(tables), workspace);
  JAX_TT_RETURN_IF_ERROR(ForEachWidth([&](auto storage, auto width) -> Status {
    AddPoolRows<typename decltype(storage)::type, decltype(width)::value>(launches);
    return {};
  }));
  AddPoolRows<PackedRow, 4>(launches);
  AddPoolRows<PackedRow, 1>(launches);
  return launches.Run(stream);
}

}  // namespace jax_tt
