// The optimizer step of one element of a table, a slice of a TT core being a row.
#ifndef JAX_TT_CUDA_TABLE_STEP_H_
#define JAX_TT_CUDA_TABLE_STEP_H_

#include <stdint.h>

#include <type_traits>

#include "ffi/common/half.h"
#include "ffi/core/optimizers/rule.h"
#include "ffi/core/slot_arrays.h"
#include "ffi/core/stochastic.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// Rows of `width` elements with their slots, changed in place.
template <typename T>
struct TableRows {
  T* values = nullptr;
  SlotArrays slots;
  int64_t width = 0;
  uint64_t stream = 0;  // keeps the random numbers of several tables apart
};

// The numbers of one step, which only the device can read.
struct StepNumbers {
  const float* hyper = nullptr;
  const float* scale = nullptr;  // [2]: multiplies every gradient; 0 where the step may not be taken
  const uint32_t* seed = nullptr;
  bool stochastic_rounding = false;

  __device__ bool allowed() const { return scale[1] != 0.0f; }
};

// One row's step: Add for all elements if the rule has sums, StartRow once if it steps rows, Update for all elements.
template <typename T, template <typename> class Rule_>
class RowStep {
 public:
  using Rule = Rule_<float>;
  using Row = typename Rule::Row;

  __device__ RowStep(const TableRows<T>& table, const StepNumbers& step, int64_t row)
      : table_(table),
        rule_(step.hyper),
        step_(step),
        rounding_(step.seed, table.stream, row, step.stochastic_rounding),
        row_(row) {}

  __device__ void Add(int64_t element, float scaled_gradient, float* sums) const {
    const int64_t at = row_ * table_.width + element;
    float slots[kElementSlotsOrOne<Rule>] = {};
    for (int k = 0; k < Rule::kElementSlots; ++k) slots[k] = table_.slots.Get(k, at);
    rule_.Add(ToCompute(table_.values[at]), scaled_gradient, slots, sums);
  }

  __device__ void StartRow(const float* sums) {
    float* slots[kMaxSlots] = {};
    for (int k = 0; k < Rule::kRowSlots; ++k) slots[k] = table_.slots.wide(Rule::kElementSlots + k) + row_;
    of_row_ = RowStepInPlace(rule_, static_cast<float>(table_.width), sums, slots);
  }
  // For the threads that did not start the row.
  __device__ const Row& row() const { return of_row_; }
  __device__ void set_row(const Row& row) { of_row_ = row; }

  __device__ void Update(int64_t element, float scaled_gradient) {
    const int64_t at = row_ * table_.width + element;
    float slots[kElementSlotsOrOne<Rule>] = {};
    for (int k = 0; k < Rule::kElementSlots; ++k) slots[k] = table_.slots.Get(k, at);
    const float value = rule_.Step(ToCompute(table_.values[at]), scaled_gradient, of_row_, slots);
    for (int k = 0; k < Rule::kElementSlots; ++k) StoreSlot(k, element, slots[k]);
    if constexpr (std::is_same_v<T, float>)
      table_.values[at] = value;
    else
      rounding_.Store(value, element, table_.values + at);
  }

 private:
  __device__ void StoreSlot(int slot, int64_t element, float value) const {
    const int64_t at = row_ * table_.width + element;
    if (!table_.slots.narrow) {
      table_.slots.wide(slot)[at] = value;
      return;
    }
    const RowRounding rounding(step_.seed, SlotStream(table_.stream, slot), row_, step_.stochastic_rounding);
    rounding.Store(value, element, table_.slots.rounded(slot) + at);
  }

  const TableRows<T>& table_;
  const Rule rule_;
  const StepNumbers& step_;
  const RowRounding rounding_;
  const int64_t row_;
  Row of_row_ = {};
};

// The Row of a rule as words, which threads can hand to each other.
template <typename Rule>
union RowWords {
  static constexpr int kCount = std::is_empty_v<typename Rule::Row> ? 0 : sizeof(typename Rule::Row) / sizeof(float);
  typename Rule::Row row;
  float word[kCount > 0 ? kCount : 1];
};

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TABLE_STEP_H_
