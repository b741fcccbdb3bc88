// The optimizer steps of rows of dense tables.
#pragma once

#include <stdint.h>

#include "ffi/core/optimizers/slot_arrays.h"
#include "ffi/core/stochastic.h"
#include "ffi/cuda/dense/rows.h"
#include "ffi/cuda/tables/step.h"

namespace jax_tt {

// V numbers of a slot that has one per element.
template <int V>
__device__ __forceinline__ Packet<float, V> LoadSlot(const SlotArrays& slots, int slot, int64_t element) {
  if (!slots.narrow) return LoadPacket<V>(slots.wide(slot) + element);
  const Packet<bfloat16, V> rounded = LoadPacket<V>(slots.rounded(slot) + element);
  Packet<float, V> value;
  for (int v = 0; v < V; ++v) value.x[v] = ToCompute(rounded.x[v]);
  return value;
}

// Takes the optimizer step of a row in place.
template <typename T, typename Rule>
struct StepSink {
  static constexpr int Blocks(int V) { return V == 4 && Rule::kElementSlots == 0 ? 4 : 3; }

  const GradientTable& table;
  const DenseStep& step;
  // Read once, not for every row.
  const Rule rule;
  const float scale;
  const bool allowed, finite;

  __device__ __forceinline__ StepSink(const GradientTable& table, const TablePlan& plan)
      : table(table),
        step(table.step),
        rule(RuleOf<Rule>(step.hyper)),
        scale(step.scale[0]),
        allowed(step.scale[1] != 0.0f),
        finite(plan.flags[kNonFinite] == 0) {}

  __device__ __forceinline__ bool Skips() const { return !allowed || (step.skip_nonfinite && !finite); }

  template <int V>
  __device__ __forceinline__ void Row(const RowLanes& lanes, int64_t row, int dim, bool owner,
                                      const RowSum<V>& sum) const {
    const RowRounding rounding(step.seed, /*table=*/0, row, step.stochastic_rounding);
    Packet<float, V> gradient{};
    RowWords<Rule> of_row{};
    if constexpr (kStepsRows<Rule>) of_row.row = Start<V>(lanes, row, dim, owner, sum, &gradient);
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
      for (int s = 0; s < Rule::kElementSlots; ++s) StoreSlot(stored.slot[s], s, row, row * dim, column);
    }
  }
  __device__ __forceinline__ void Finish(bool refused) const { *table.applied = refused || !finite ? 0.0f : 1.0f; }

 private:
  // V elements of a row with their slots.
  template <int V>
  struct Stored {
    Packet<T, V> values{};
    Packet<float, V> slot[kElementSlotsOrOne<Rule>] = {};

    __device__ __forceinline__ void Load(const GradientTable& table, int64_t element) {
      values = LoadPacket<V>(static_cast<const T*>(table.values) + element);
      for (int s = 0; s < Rule::kElementSlots; ++s) slot[s] = LoadSlot<V>(table.slots, s, element);
    }
    __device__ __forceinline__ void Slots(int v, float* slots) const {
      for (int s = 0; s < Rule::kElementSlots; ++s) slots[s] = slot[s].x[v];
    }
  };

  template <int V>
  __device__ __forceinline__ void StoreSlot(const Packet<float, V>& value, int slot, int64_t row, int64_t row_begin,
                                            int column) const {
    if (!table.slots.narrow) return StorePacket(value, table.slots.wide(slot) + row_begin + column);
    const RowRounding rounding(step.seed, SlotStream(/*table=*/0, slot), row, step.stochastic_rounding);
    Packet<bfloat16, V> rounded;
    for (int v = 0; v < V; ++v) rounding.Store(value.x[v], column + v, &rounded.x[v]);
    StorePacket(rounded, table.slots.rounded(slot) + row_begin + column);
  }

  // The sums over the row and its RowStep; the gradient of the last columns is kept.  Every lane gets what it returns.
  template <int V>
  __device__ __forceinline__ typename Rule::Row Start(const RowLanes& lanes, int64_t row, int dim, bool owner,
                                                      const RowSum<V>& sum, Packet<float, V>* gradient) const {
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
      for (int s = 0; s < Rule::kRowSlots; ++s) slots[s] = table.slots.wide(Rule::kElementSlots + s) + row;
      of_row.row = RowStepInPlace(rule, static_cast<float>(dim), sums, slots);
    }
    for (int k = 0; k < RowWords<Rule>::kCount; ++k) of_row.word[k] = lanes.OfFirst(of_row.word[k]);
    return of_row.row;
  }
};

// The launches of one rule, by storage type and number of columns at a time.
struct DenseLaunches {
  RowsLaunch launch[3][2];

  RowsLaunch Of(Storage storage, bool four_wide) const { return launch[static_cast<int>(storage)][four_wide]; }
};

template <template <typename> class Rule>
inline constexpr DenseLaunches kDenseLaunches = {
    {{kSumRows<1, StepSink<float, Rule<float>>>, kSumRows<4, StepSink<float, Rule<float>>>},
     {kSumRows<1, StepSink<bfloat16, Rule<float>>>, kSumRows<4, StepSink<bfloat16, Rule<float>>>},
     {kSumRows<1, StepSink<float16, Rule<float>>>, kSumRows<4, StepSink<float16, Rule<float>>>}}};

}  // namespace jax_tt
