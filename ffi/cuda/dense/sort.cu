// The sort of the ids of large batches, those of all tables at once.
#include <algorithm>
#include <bit>

#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/dense/ids.h"
#include "ffi/cuda/dense/lanes.h"
#include "ffi/cuda/dense/plan.h"
#include "ffi/cuda/sort/sort.h"

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
    const bool first = static_cast<uint64_t>(i) % static_cast<uint64_t>(per_group) == 0;
    if (!OffsetIsSound(batch, i, first)) atomicOr(plan.flags, kBadOffsets);
  }
  if (i >= plan.n) return;
  const int32_t bag = BagOf(batch, i);
  const int64_t row = bag < 0 ? kNoRow : ResolveId(batch, i), to = table.place.position + i;
  if (row == kPoisonedRow) atomicOr(plan.flags, kBadIds);
  // Positions that read no row come last.
  all.keys.Set(to, plan.first_key + (row < 0 ? batch.num_embeddings : row));
  all.bag_of[to] = bag;
  if (batch.weights != nullptr) all.weight_of[to] = batch.weights[i];
}

// The sort of all positions by their keys 0 .. num_keys - 1.
StableSort SortOf(const DensePlan& plan, Workspace& workspace) {
  StableSort sort;
  sort.n = plan.sorted_together;
  const int bits = std::max<int>(1, std::bit_width(static_cast<uint64_t>(plan.num_keys - 1)));
  sort.AddPasses(plan.keys.low, plan.two_words ? std::min(bits, RowKeys::kLowBits) : bits);
  if (plan.two_words) sort.AddPasses(plan.keys.high, std::max(bits - RowKeys::kLowBits, 0));
  sort.copies[0] = {plan.keys.low, plan.sorted.low};
  sort.copies[1] = {plan.keys.high, plan.sorted.high};
  sort.copies[2] = {plan.bag_of, plan.bag};
  if (plan.weighted)
    sort.copies[3] = {reinterpret_cast<int32_t*>(plan.weight_of), reinterpret_cast<int32_t*>(plan.weight)};
  sort.PlaceZeros(workspace);
  sort.Place(workspace);
  return sort;
}

}  // namespace

void PlaceSort(const DensePlan& plan, Workspace& workspace) { SortOf(plan, workspace); }

void AddSort(const DensePlan& plan, GradientLaunches& launches) {
  Workspace memory(plan.sorting);
  const StableSort sort = SortOf(plan, memory);
  launches.Add([plan, zeros = sort.num_zeros](cudaStream_t stream) {
    const auto bytes = static_cast<size_t>(plan.sorting - reinterpret_cast<char*>(plan.flags));
    return ToStatus(cudaMemsetAsync(plan.flags, 0, bytes + static_cast<size_t>(zeros) * sizeof(int32_t), stream));
  });
  launches.Add([](const GradientTable& table) { return !SplitsRows(table); },
               [](const GradientTable& table) {
                 const DenseBatch& batch = table.batch;
                 return DenseBlocks(std::max(batch.n(), batch.groups * (batch.bags + 1)));
               },
               [plan](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
                 return Launch(stream, on.blocks, kDenseThreads, 0, MakeKeys, on.tables, plan);
               });
  launches.Add([sort](cudaStream_t stream) { return sort.Run(stream); });
}

}  // namespace jax_tt
