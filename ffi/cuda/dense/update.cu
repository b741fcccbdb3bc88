// The fused update of dense tables: the gradient of a row goes into its optimizer step without passing through memory.
#include <compare>
#include <set>
#include <utility>

#include "ffi/common/rules.h"
#include "ffi/cuda/dense/backward.h"
#include "ffi/cuda/dense/long_rows.h"
#include "ffi/cuda/dense/step.h"
#include "ffi/cuda/dense/widths.h"
#include "ffi/cuda/rules/rule_launches.h"

namespace jax_tt {
namespace {

// Sets a flag when any gradient is infinite or NaN.
struct FiniteSink {
  static constexpr int Blocks(int) { return 4; }

  const float* scale;
  int32_t* flags;

  __device__ __forceinline__ FiniteSink(const GradientTable& table, const TablePlan& plan)
      : scale(table.step.scale), flags(plan.flags) {}

  template <int V>
  __device__ __forceinline__ void Row(const RowLanes& lanes, int64_t, int dim, bool owner, const RowSum<V>& sum) const {
    float probe = 0;  // a sum of products with zero is zero unless one of them is infinite or NaN
    for (int first = 0; first < dim; first += lanes.count * V) {
      const Packet<float, V> gradient = sum(first + lanes.lane() * V);
      for (int v = 0; v < V; ++v) probe += (*scale * gradient.x[v]) * 0.0f;
    }
    if (owner && probe != 0.0f) atomicOr(flags + kNonFinite, 1);
  }
  __device__ __forceinline__ bool Skips() const { return false; }
  __device__ __forceinline__ void Finish(bool) const {}
};

template <int V>
void AddFiniteChecks(const DensePlan& plan, GradientLaunches& launches) {
  const auto takes = [](const GradientTable& table) {
    return table.step.skip_nonfinite && table.widths.four_wide == (V == 4);
  };
  AddSumRows(kSumRows<V, FiniteSink>, V, takes, plan, launches);
}

// The tables whose rows one kernel steps.
struct StepOf {
  Storage storage;
  bool four_wide;
  int kind;

  explicit StepOf(const GradientTable& table)
      : storage(table.storage), four_wide(table.widths.four_wide), kind(table.step.kind) {}
  auto operator<=>(const StepOf&) const = default;
};

Status AddSteps(const DensePlan& plan, GradientLaunches& launches) {
  std::set<StepOf> steps;
  for (const GradientTable& table : launches.tables()) steps.insert(StepOf(table));
  for (const StepOf& step : steps) {
    const RuleLaunches* of_rule = nullptr;
    JAX_TT_RETURN_IF_ERROR(FindLaunches(step.kind, &of_rule));
    AddSumRows(
        of_rule->dense->Of(step.storage, step.four_wide), step.four_wide ? 4 : 1,
        [step](const GradientTable& table) { return StepOf(table) == step; }, plan, launches);
  }
  return {};
}

}  // namespace

Status DenseUpdate(cudaStream_t stream, std::vector<GradientTable> tables, void* workspace) {
  DensePlan plan;
  JAX_TT_RETURN_IF_ERROR(MakeDensePlan(&tables, /*all_or_none=*/true, workspace, &plan));
  for (GradientTable& table : tables)
    table.widths = WidthsOf(table, table.out_gradient, RuleTraits(table.step.kind).element_slots);
  GradientLaunches launches(std::move(tables), static_cast<char*>(workspace) + plan.bytes);
  AddPlan(plan, launches);
  JAX_TT_RETURN_IF_ERROR(AddWeightGradients(plan, launches));
  AddLongRows(plan, launches);
  AddFiniteChecks<4>(plan, launches);
  AddFiniteChecks<1>(plan, launches);
  JAX_TT_RETURN_IF_ERROR(AddSteps(plan, launches));
  return launches.Run(stream);
}

}  // namespace jax_tt
