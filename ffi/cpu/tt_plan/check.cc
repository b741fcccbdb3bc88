#include "ffi/cpu/tt_plan/check.h"

namespace jax_tt {
namespace {

// Whether low <= values[i] < high for all i; branch-free, so that it is vectorised.
bool AllWithin(const int32_t* values, int64_t count, int64_t low, int64_t high) {
  if (count > 0 && high <= low) return false;
  const uint32_t offset = static_cast<uint32_t>(static_cast<int32_t>(low)), size = static_cast<uint32_t>(high - low);
  uint32_t outside = 0;
  for (int64_t i = 0; i < count; ++i)
    outside |= static_cast<uint32_t>(static_cast<uint32_t>(values[i]) - offset >= size);
  return outside == 0;
}

bool Ascending(const int32_t* values, int64_t count) {
  uint32_t falls = 0;
  for (int64_t i = 1; i < count; ++i) falls |= static_cast<uint32_t>(values[i] <= values[i - 1]);
  return falls == 0;
}

bool SideIsSound(const TTShape& shape, const Side& side, const PlanLayout& layout, int first_level, int64_t begin,
                 int64_t rows, const int32_t* plan, const int32_t* counts) {
  int64_t items = rows;
  for (int k = side.depth; k >= 1; --k) {
    const LevelView<const int32_t> level = layout.level(plan, first_level + k - 1, begin);
    const int64_t nodes = counts[first_level + k - 1];
    if (nodes < 1 || nodes > items) return false;
    if (!AllWithin(level.slice, nodes, 0, shape.p[side.core[k]]) || !AllWithin(level.child_end, nodes, 0, items + 1) ||
        !AllWithin(level.child, items, 0, items) || !AllWithin(level.node_of_child, items, 0, nodes))
      return false;
    // The product of one core is the slice itself, so no two nodes may share it.
    if (k == 1 && !Ascending(level.slice, nodes)) return false;
    items = nodes;
  }
  return true;
}

bool IsSound(const TTShape& shape, const Contraction& contraction, const PlanLayout& layout, int64_t num_bags,
             const int32_t* plan) {
  const int32_t* header = layout.header(plan);
  const int64_t valid = header[PlanLayout::kValid], rows = header[PlanLayout::kRows];
  const int64_t chunks = header[PlanLayout::kChunks];
  if (valid < 0 || valid > layout.n || rows < 0 || rows > valid || chunks < 0 || chunks > layout.max_chunks())
    return false;
  // All bags must be below num_bags; those of positions in `order` must also be at least 0.
  if (!AllWithin(layout.order(plan), valid, 0, layout.n) || !AllWithin(layout.row_end(plan), rows, 0, valid + 1) ||
      !AllWithin(layout.bag(plan), layout.n, PlanLayout::kPoisoned, num_bags))
    return false;
  const int32_t* order = layout.order(plan);
  const int32_t* bag = layout.bag(plan);
  int32_t negative = 0;
  for (int64_t i = 0; i < valid; ++i) negative |= bag[order[i]];
  if (negative < 0) return false;
  int64_t begin = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    const int32_t* chunk = layout.chunk(plan, c);
    const int64_t count = chunk[0] - begin;
    if (count < 1 || count > layout.chunk_rows || chunk[0] > rows) return false;
    if (!SideIsSound(shape, contraction.primary, layout, 0, begin, count, plan, chunk + 1) ||
        !SideIsSound(shape, contraction.secondary, layout, contraction.primary.depth, begin, count, plan, chunk + 1))
      return false;
    begin = chunk[0];
  }
  return begin == rows;
}

}  // namespace

Status CheckPlan(const TTShape& shape, const Contraction& contraction, const PlanLayout& layout, int64_t num_bags,
                 const int32_t* plan) {
  if (IsSound(shape, contraction, layout, num_bags, plan)) return {};
  return InvalidArgument(
      "the plan is not one of this table and batch; what the forward pass saves for the backward "
      "pass must reach it unchanged");
}

}  // namespace jax_tt
