#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>

#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/dense_ids.h"
#include "ffi/cuda/dense_lanes.h"
#include "ffi/cuda/dense_sort.h"
#include "ffi/cuda/sort.h"

namespace jax_tt {
namespace {

// Thread i of a table takes position i and the i-th offset.
__global__ void __launch_bounds__(kDenseThreads)
    MakeKeys(const __grid_constant__ TableList<GradientTable> tables, const __grid_constant__ DensePlan all) {
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const DenseBatch& batch = table.batch;
  const TablePlan plan = all.Of(table);
  const int64_t i = block.index * kDenseThreads + threadIdx.x, per_group = batch.bags + 1;
  if (i < batch.groups * per_group) {
    const int32_t offset = batch.offsets[i];
    const bool first = static_cast<uint64_t>(i) % static_cast<uint64_t>(per_group) == 0;
    if (offset > batch.capacity || (first ? offset != 0 : offset < batch.offsets[i - 1]))
      atomicOr(plan.flags + kBadOffsets, 1);
  }
  if (i >= plan.n) return;
  const int32_t bag = BagOf(batch, i);
  const int64_t row = bag < 0 ? kNoRow : ResolveId(batch, i);
  if (row == kPoisonedRow) atomicOr(plan.flags + kBadIds, 1);
  // Positions that read no row come last.
  plan.keys.Set(i, plan.first_key + (row < 0 ? batch.num_embeddings : row));
  plan.bag_of[i] = row == kPoisonedRow ? TablePlan::kPoisoned : row < 0 ? -1 : bag;
}

// A warp takes a tile of sorted positions, and one more warp the word after the last tile.
__global__ void __launch_bounds__(kDenseThreads)
    MarkRows(const __grid_constant__ TableList<GradientTable> tables, const __grid_constant__ DensePlan all,
             const int32_t* order, bool all_or_none) {
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const DenseBatch& batch = table.batch;
  const TablePlan plan = all.Of(table);
  const int64_t i = block.index * kDenseThreads + threadIdx.x, tile = i / kDenseTile;
  const int32_t first = table.place.position;
  bool head = true;
  if (i < plan.n) {
    const int32_t position = order[first + i] - first;
    const int64_t row = plan.Row(position);
    head = i == 0 || row != plan.Row(order[first + i - 1] - first);
    const bool refused = plan.flags[kBadOffsets] != 0 || (all_or_none && plan.flags[kBadIds] != 0);
    plan.bag[i] = row < batch.num_embeddings && !refused ? plan.bag_of[position] : -1;
    if (batch.weights != nullptr) plan.weight[i] = batch.weights[position];
    plan.row[i] = row;
  }
  const unsigned heads = __ballot_sync(kAllLanes, head);
  if (tile <= plan.tiles && i % kDenseTile == 0) plan.head[tile] = heads;
}

bool NeedsTwoWords(int64_t num_keys) { return num_keys - 1 > INT32_MAX; }

// All passes over the keys 0 .. num_keys - 1; returns how many.
int MakePasses(int64_t num_keys, const RowKeys& keys, SortPass* passes) {
  const int bits = std::max<int>(1, std::bit_width(static_cast<uint64_t>(std::max<int64_t>(num_keys, 1) - 1)));
  if (!NeedsTwoWords(num_keys)) return AddSortPasses(keys.low, bits, passes);
  const int count = AddSortPasses(keys.low, RowKeys::kLowBits, passes);
  return count + AddSortPasses(keys.high, bits - RowKeys::kLowBits, passes + count);
}

// Adds the sort of all positions; returns where it leaves their order.
const int32_t* AddStableSort(const DensePlan& plan, GradientLaunches& launches) {
  std::array<SortPass, kMaxSortPasses> passes;
  const int count = MakePasses(plan.num_keys, plan.keys, passes.data());
  launches.Add([plan, passes, count](cudaStream_t stream) {
    int32_t* orders[kMaxSortPasses] = {};
    for (int k = 0; k < count; ++k) orders[k] = plan.orders[k % 2];
    TableQueue queue;
    StableSort(queue, plan.positions, passes.data(), count, orders, plan.sorting);
    return queue.Run(stream);
  });
  return plan.orders[(count - 1) % 2];
}

}  // namespace

Status DensePlan::Add(const DenseSize& size, PlanPlace* place) {
  constexpr int64_t kMostKeys = int64_t{1} << 61;  // what two words hold
  const int64_t own_tiles = (size.n + kDenseTile - 1) / kDenseTile;
  if (size.n > INT32_MAX - positions)
    return InvalidArgument("one call takes at most 2^31 - 1 ids of all tables; look up fewer features in a call");
  if (size.num_embeddings >= kMostKeys - num_keys)
    return InvalidArgument("the tables of one call have at most 2^61 rows; look up fewer features in a call");
  *place = {num_keys, partials, static_cast<int32_t>(positions), static_cast<int32_t>(tiles),
            static_cast<int32_t>(tables)};
  positions += size.n;
  tiles += own_tiles + 1;
  num_keys += size.num_embeddings + 1;
  partials += (own_tiles * size.dim + 3) / 4 * 4;  // packets of four begin at multiples of four
  ++tables;
  return {};
}

void DensePlan::Allocate(void* memory) {
  SortPass passes[kMaxSortPasses];
  const int num_passes = MakePasses(num_keys, {}, passes);
  int max_bins = 1;
  for (int k = 0; k < num_passes; ++k) max_bins = std::max(max_bins, passes[k].bins);
  bytes = 0;
  const auto take = [this, memory](auto** array, int64_t count) {
    using T = std::remove_pointer_t<std::remove_pointer_t<decltype(array)>>;
    constexpr int64_t kAlignment = 128;
    if (memory != nullptr) *array = reinterpret_cast<T*>(static_cast<char*>(memory) + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  };
  take(&flags, tables * kDenseFlags);
  take(&keys.low, positions);
  if (NeedsTwoWords(num_keys)) take(&keys.high, positions);
  take(&bag_of, positions);
  for (int32_t*& order : orders) take(&order, positions);
  take(&head, tiles);
  take(&row, tiles * kDenseTile);
  take(&bag, tiles * kDenseTile);
  take(&weight, tiles * kDenseTile);
  take(&partial, partials);
  take(&long_row, tiles);
  take(&sorting, SortWorkspace(positions, max_bins));
}

Status MakeDensePlan(std::vector<GradientTable>* tables, void* memory, DensePlan* plan) {
  for (GradientTable& table : *tables) {
    const DenseBatch& batch = table.batch;
    JAX_TT_RETURN_IF_ERROR(plan->Add({batch.num_embeddings, batch.dim, batch.n()}, &table.place));
  }
  plan->Allocate(memory);
  return {};
}

Status DenseWorkspace(std::string_view op, const std::vector<DenseSize>& sizes, int64_t columns, int64_t* bytes) {
  const auto tables = static_cast<int64_t>(sizes.size());
  if (op == "forward") {
    *bytes = TableLaunches<ForwardTable>::Bytes(tables, columns);
    return {};
  }
  DensePlan plan;
  PlanPlace place;
  for (const DenseSize& size : sizes) JAX_TT_RETURN_IF_ERROR(plan.Add(size, &place));
  plan.Allocate(nullptr);
  *bytes = plan.bytes + GradientLaunches::Bytes(tables, columns);
  return {};
}

void AddSort(const DensePlan& plan, bool all_or_none, GradientLaunches& launches) {
  const auto all = [](const GradientTable&) { return true; };
  launches.Add([plan](cudaStream_t stream) {
    const auto bytes = static_cast<size_t>(plan.tables) * kDenseFlags * sizeof(int32_t);
    return ToStatus(cudaMemsetAsync(plan.flags, 0, bytes, stream));
  });
  launches.Add(
      all,
      [](const GradientTable& table) {
        const DenseBatch& batch = table.batch;
        return DenseBlocks(std::max(batch.n(), batch.groups * (batch.bags + 1)));
      },
      [plan](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
        return Launch(stream, on.blocks, kDenseThreads, 0, MakeKeys, on.tables, plan);
      });
  const int32_t* order = AddStableSort(plan, launches);
  launches.Add(
      all, [](const GradientTable& table) { return DenseBlocks((TilesOf(table) + 1) * kDenseTile); },
      [=](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
        return Launch(stream, on.blocks, kDenseThreads, 0, MarkRows, on.tables, plan, order, all_or_none);
      });
}

}  // namespace jax_tt
