#include <algorithm>
#include <bit>

#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/dense_ids.h"
#include "ffi/cuda/dense_lanes.h"
#include "ffi/cuda/dense_sort.h"
#include "ffi/cuda/sort.h"
#include "ffi/cuda/workspace.h"

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
__global__ void __launch_bounds__(kDenseThreads) MarkRows(const __grid_constant__ TableList<GradientTable> tables,
                                                          const __grid_constant__ DensePlan all, bool all_or_none) {
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const DenseBatch& batch = table.batch;
  const TablePlan plan = all.Of(table);
  const int64_t i = block.index * kDenseThreads + threadIdx.x, tile = i / kDenseTile;
  const int32_t first = table.place.position;
  bool head = true;
  if (i < plan.n) {
    const int32_t position = all.order[first + i] - first;
    const int64_t row = all.sorted.Get(first + i) - plan.first_key;
    head = i == 0 || row != all.sorted.Get(first + i - 1) - plan.first_key;
    const bool refused = plan.flags[kBadOffsets] != 0 || (all_or_none && plan.flags[kBadIds] != 0);
    plan.bag[i] = row < batch.num_embeddings && !refused ? plan.bag_of[position] : -1;
    if (batch.weights != nullptr) plan.weight[i] = batch.weights[position];
    plan.row[i] = row;
  }
  const unsigned heads = __ballot_sync(kAllLanes, head);
  if (tile <= plan.tiles && i % kDenseTile == 0) plan.head[tile] = heads;
}

bool NeedsTwoWords(int64_t num_keys) { return num_keys - 1 > INT32_MAX; }

// The sort of all positions by their keys 0 .. num_keys - 1.
StableSort SortOf(const DensePlan& plan, Workspace& workspace) {
  StableSort sort;
  sort.n = plan.positions;
  const int bits = std::max<int>(1, std::bit_width(static_cast<uint64_t>(std::max<int64_t>(plan.num_keys, 1) - 1)));
  const bool two = NeedsTwoWords(plan.num_keys);
  sort.AddPasses(plan.keys.low, two ? RowKeys::kLowBits : bits);
  if (two) sort.AddPasses(plan.keys.high, bits - RowKeys::kLowBits);
  sort.pass[sort.count - 1].order = plan.order;
  sort.copies[0] = {plan.keys.low, plan.sorted.low};
  sort.copies[1] = {plan.keys.high, plan.sorted.high};
  sort.PlaceZeros(workspace);
  sort.Place(workspace);
  return sort;
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
  Workspace workspace(memory);
  const int64_t high = NeedsTwoWords(num_keys) ? positions : 0;
  keys.low = workspace.Take<int32_t>(positions);
  keys.high = high == 0 ? nullptr : workspace.Take<int32_t>(high);
  sorted.low = workspace.Take<int32_t>(positions);
  sorted.high = high == 0 ? nullptr : workspace.Take<int32_t>(high);
  order = workspace.Take<int32_t>(positions);
  bag_of = workspace.Take<int32_t>(positions);
  head = workspace.Take<uint32_t>(tiles);
  row = workspace.Take<int64_t>(tiles * kDenseTile);
  bag = workspace.Take<int32_t>(tiles * kDenseTile);
  weight = workspace.Take<float>(tiles * kDenseTile);
  partial = workspace.Take<float>(partials);
  long_row = workspace.Take<int32_t>(tiles);
  // Side by side with what the sort needs to be zero.
  flags = workspace.Take<int32_t>(tables * kDenseFlags);
  sorting = workspace.Take<char>(0);
  SortOf(*this, workspace);
  bytes = workspace.bytes();
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
  Workspace memory(plan.sorting);
  const StableSort sort = SortOf(plan, memory);
  launches.Add([plan, zeros = sort.num_zeros](cudaStream_t stream) {
    const auto bytes = static_cast<size_t>(plan.sorting - reinterpret_cast<char*>(plan.flags));
    return ToStatus(cudaMemsetAsync(plan.flags, 0, bytes + static_cast<size_t>(zeros) * sizeof(int32_t), stream));
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
  launches.Add([sort](cudaStream_t stream) {
    TableQueue queue;
    sort.Enqueue(queue);
    return queue.Run(stream);
  });
  launches.Add(
      all, [](const GradientTable& table) { return DenseBlocks((TilesOf(table) + 1) * kDenseTile); },
      [=](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
        return Launch(stream, on.blocks, kDenseThreads, 0, MarkRows, on.tables, plan, all_or_none);
      });
}

}  // namespace jax_tt
