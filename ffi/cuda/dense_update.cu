// The fused update of dense tables: the gradient of a row goes into its optimizer step without passing through memory.
#include <set>
#include <utility>

#include "ffi/core/stochastic.h"
#include "ffi/cuda/dense_backward.h"
#include "ffi/cuda/dense_rows.h"
#include "ffi/cuda/dense_widths.h"
#include "ffi/cuda/table_step.h"

namespace jax_tt {
namespace {

// Sets a flag when any gradient is infinite or NaN.
struct FiniteSink {
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
  __device__ __forceinline__ void Finish() const {}
};

// Takes the optimizer step of a row in place.
template <typename T, typename Rule>
struct StepSink {
  const GradientTable& table;
  const DenseStep& step;
  const int32_t* flags;

  __device__ __forceinline__ StepSink(const GradientTable& table, const TablePlan& plan)
      : table(table), step(table.step), flags(plan.flags) {}

  template <int V>
  __device__ __forceinline__ void Row(const RowLanes& lanes, int64_t row, int dim, bool owner,
                                      const RowSum<V>& sum) const {
    if (step.scale[1] == 0.0f || (step.skip_nonfinite && flags[kNonFinite] != 0)) return;
    const Rule rule(step.hyper);
    const float scale = *step.scale;
    const RowRounding rounding(step.seed, /*table=*/0, row, step.stochastic_rounding);
    Packet<float, V> gradient{};
    RowWords<Rule> of_row{};
    if constexpr (kStepsRows<Rule>) of_row.row = Start<V>(lanes, rule, row, dim, owner, scale, sum, &gradient);
    for (int first = 0; first < dim; first += lanes.count * V) {
      const int column = first + lanes.lane() * V;
      const bool writes = owner && column < dim;
      // The row and its slots are asked for before the gradient is summed, not after.
      Stored<V> stored;
      if (writes) stored.Load(table, row * dim + column);
      // A rule with sums has the gradient already, if these are the only columns.
      if (Rule::kSums == 0 || dim > lanes.count * V) gradient = sum(column);
      if (!writes) continue;
      for (int v = 0; v < V; ++v) {
        float slots[kElementSlotsOrOne<Rule>] = {};
        stored.Slots(v, slots);
        const float value = rule.Step(ToCompute(stored.values.x[v]), scale * gradient.x[v], of_row.row, slots);
        for (int s = 0; s < Rule::kElementSlots; ++s) stored.slot[s].x[v] = slots[s];
        rounding.Store(value, column + v, &stored.values.x[v]);
      }
      StorePacket(stored.values, static_cast<T*>(table.values) + row * dim + column);
      for (int s = 0; s < Rule::kElementSlots; ++s) StorePacket(stored.slot[s], table.slots[s] + row * dim + column);
    }
  }
  __device__ __forceinline__ void Finish() const {
    *table.applied = (flags[kNonFinite] | flags[kBadOffsets] | flags[kBadIds]) == 0 ? 1.0f : 0.0f;
  }

 private:
  // V elements of a row with their slots.
  template <int V>
  struct Stored {
    Packet<T, V> values{};
    Packet<float, V> slot[kElementSlotsOrOne<Rule>] = {};

    __device__ __forceinline__ void Load(const GradientTable& table, int64_t element) {
      values = LoadPacket<V>(static_cast<const T*>(table.values) + element);
      for (int s = 0; s < Rule::kElementSlots; ++s) slot[s] = LoadPacket<V>(table.slots[s] + element);
    }
    __device__ __forceinline__ void Slots(int v, float* slots) const {
      for (int s = 0; s < Rule::kElementSlots; ++s) slots[s] = slot[s].x[v];
    }
  };

  // The sums over the row and its RowStep; the gradient of the last columns is kept.  Every lane gets what it returns.
  template <int V>
  __device__ __forceinline__ typename Rule::Row Start(const RowLanes& lanes, const Rule& rule, int64_t row, int dim,
                                                      bool owner, float scale, const RowSum<V>& sum,
                                                      Packet<float, V>* gradient) const {
    float sums[kSumsOrOne<Rule>] = {};
    if constexpr (Rule::kSums > 0) {
      for (int first = 0; first < dim; first += lanes.count * V) {
        const int column = first + lanes.lane() * V;
        *gradient = sum(column);
        if (!owner || column >= dim) continue;
        Stored<V> stored;
        stored.Load(table, row * dim + column);
        for (int v = 0; v < V; ++v) {
          float slots[kElementSlotsOrOne<Rule>] = {};
          stored.Slots(v, slots);
          rule.Add(ToCompute(stored.values.x[v]), scale * gradient->x[v], slots, sums);
        }
      }
      for (float& value : sums) value = lanes.Sum(value);
    }
    RowWords<Rule> of_row{};
    if (owner && lanes.lane() == 0) {
      float* slots[kMaxSlots] = {};
      for (int s = 0; s < Rule::kRowSlots; ++s) slots[s] = table.slots[Rule::kElementSlots + s] + row;
      of_row.row = RowStepInPlace(rule, static_cast<float>(dim), sums, slots);
    }
    for (int k = 0; k < RowWords<Rule>::kCount; ++k) of_row.word[k] = lanes.OfFirst(of_row.word[k]);
    return of_row.row;
  }
};

template <int V>
void AddFiniteChecks(const DensePlan& plan, GradientLaunches& launches) {
  const auto takes = [](const GradientTable& table) {
    return table.step.skip_nonfinite && table.widths.four_wide == (V == 4);
  };
  AddSumRows(SumRows<V, FiniteSink>, V, takes, plan, launches);
}

template <typename T, int V>
Status AddSteps(const DensePlan& plan, GradientLaunches& launches) {
  const auto takes = [](const GradientTable& table) {
    return table.storage == kStorage<T> && table.widths.four_wide == (V == 4);
  };
  std::set<int> kinds;
  for (const GradientTable& table : launches.tables())
    if (takes(table)) kinds.insert(table.step.kind);
  for (int kind : kinds) {
    JAX_TT_RETURN_IF_ERROR(DispatchRule(kind, [&](auto tag) -> Status {
      using Rule = typename decltype(tag)::template Rule<float>;
      const auto takes_kind = [=](const GradientTable& table) { return takes(table) && table.step.kind == kind; };
      AddSumRows(SumRows<V, StepSink<T, Rule>>, V, takes_kind, plan, launches);
      return {};
    }));
  }
  return {};
}

}  // namespace

Status DenseUpdate(cudaStream_t stream, std::vector<GradientTable> tables, void* workspace) {
  DensePlan plan;
  JAX_TT_RETURN_IF_ERROR(MakeDensePlan(&tables, workspace, &plan));
  for (GradientTable& table : tables)
    table.widths = WidthsOf(table, table.out_gradient, kOptimizers[table.step.kind].element_slots);
  GradientLaunches launches(std::move(tables), static_cast<char*>(workspace) + plan.bytes);
  AddSort(plan, /*all_or_none=*/true, launches);
  JAX_TT_RETURN_IF_ERROR(AddWeightGradients(plan, launches));
  AddLongRows(plan, launches);
  AddFiniteChecks<4>(plan, launches);
  AddFiniteChecks<1>(plan, launches);
  JAX_TT_RETURN_IF_ERROR(ForEachWidth([&](auto storage, auto width) {
    return AddSteps<typename decltype(storage)::type, decltype(width)::value>(plan, launches);
  }));
  return launches.Run(stream);
}

}  // namespace jax_tt
