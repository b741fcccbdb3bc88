#include <algorithm>

#include "ffi/cuda/dense/plan.h"

namespace jax_tt {

Status DensePlan::AddOne(const DenseSize& size, PlanPlace* place) {
  constexpr int64_t kMostKeys = int64_t{1} << 61;  // what two words hold
  const bool splits = SplitsRows(size.n, size.num_embeddings);
  if (size.n > INT32_MAX - positions)
    return InvalidArgument("one call takes at most 2^31 - 1 ids of all tables; look up fewer features in a call");
  if (size.num_embeddings >= kMostKeys - num_keys)
    return InvalidArgument("the tables of one call have at most 2^61 rows; look up fewer features in a call");
  *place = {splits ? 0 : num_keys, partials, static_cast<int32_t>(positions), static_cast<int32_t>(pieces),
            static_cast<int32_t>(tables)};
  const int64_t own_pieces = (size.n + kDensePiece - 1) / kDensePiece + 1;
  positions += size.n;
  pieces += own_pieces;
  // Packets of four begin at multiples of four.
  partials += ((own_pieces + (splits ? SplitBlocks(size.n) : 0)) * size.dim + 3) / 4 * 4;
  if (!splits) {
    sorted_together = positions;
    num_keys += size.num_embeddings + 1;
  }
  two_words |= std::max(num_keys - 1, size.num_embeddings) > INT32_MAX;
  ++tables;
  return {};
}

Status DensePlan::Add(const std::vector<DenseSize>& sizes, std::vector<PlanPlace>* places) {
  places->resize(sizes.size());
  for (const bool splits : {false, true})
    for (size_t k = 0; k < sizes.size(); ++k)
      if (SplitsRows(sizes[k].n, sizes[k].num_embeddings) == splits)
        JAX_TT_RETURN_IF_ERROR(AddOne(sizes[k], &(*places)[k]));
  return {};
}

void DensePlan::Allocate(void* memory) {
  Workspace workspace(memory);
  const auto words = [&](int64_t count) {
    RowKeys taken{workspace.Take<int32_t>(count)};
    if (two_words) taken.high = workspace.Take<int32_t>(count);
    return taken;
  };
  keys = words(sorted_together);
  sorted = words(positions);
  bag_of = workspace.Take<int32_t>(sorted_together);
  weight_of = workspace.Take<float>(sorted_together);
  split = workspace.Take<uint64_t>(positions - sorted_together);
  bag = workspace.Take<int32_t>(positions);
  weight = workspace.Take<float>(positions);
  partial = workspace.Take<float>(partials);
  more = workspace.Take<MorePieces>(pieces);
  long_row = workspace.Take<int32_t>(pieces);
  // Side by side with what the sort needs to be zero.
  flags = workspace.Take<int32_t>(tables * kDenseFlags);
  sorting = workspace.Take<char>(0);
  if (sorted_together > 0) PlaceSort(*this, workspace);
  bytes = workspace.bytes();
}

Status MakeDensePlan(std::vector<GradientTable>* tables, bool all_or_none, void* memory, DensePlan* plan) {
  std::vector<DenseSize> sizes;
  for (const GradientTable& table : *tables) {
    const DenseBatch& batch = table.batch;
    sizes.push_back({batch.num_embeddings, batch.dim, batch.n()});
    plan->weighted |= !SplitsRows(table) && batch.weights != nullptr;
  }
  std::vector<PlanPlace> places;
  JAX_TT_RETURN_IF_ERROR(plan->Add(sizes, &places));
  for (size_t k = 0; k < places.size(); ++k) (*tables)[k].place = places[k];
  plan->all_or_none = all_or_none;
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
  std::vector<PlanPlace> places;
  JAX_TT_RETURN_IF_ERROR(plan.Add(sizes, &places));
  plan.Allocate(nullptr);
  *bytes = plan.bytes + GradientLaunches::Bytes(tables, columns);
  return {};
}

void AddPlan(const DensePlan& plan, GradientLaunches& launches) {
  // The sort comes first, since it clears the flags of all tables.
  if (plan.sorted_together > 0) AddSort(plan, launches);
  AddSplit(plan, launches);
}

}  // namespace jax_tt
