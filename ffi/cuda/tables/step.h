// The optimizer step of one element of a table, a slice of a TT core being a row.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "ffi/core/half.h"
#include "ffi/core/optimizers/rule.h"
#include "ffi/core/optimizers/slot_arrays.h"
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
// What it reads in loops is a copy: reads by reference would be repeated after every write to the row.
template <typename T, template <typename> class Rule_>
class RowStep {
 public:
  using Rule = Rule_<float>;
  using Row = typename Rule::Row;

  // What memory has of an element.  Several are loaded before the first is used, so that no load waits for another.
  struct Element {
    T value;
    float slots[kElementSlotsOrOne<Rule>];
  };

  __device__ RowStep(const TableRows<T>& table, const StepNumbers& step, int64_t row)
      : rule_(RuleOf<Rule>(step.hyper)),
        slots_(table.slots),
        width_(table.width),
        row_(row),
        values_(table.values + row * table.width),
        rounding_(step.seed, table.stream, row, step.stochastic_rounding),
        seed_(step.seed),
        stream_(table.stream) {}

  __device__ __forceinline__ Element Load(int64_t element) const {
    Element loaded{values_[element], {}};
    for (int k = 0; k < Rule::kElementSlots; ++k) loaded.slots[k] = slots_.Get(k, row_ * width_ + element);
    return loaded;
  }

  __device__ __forceinline__ void Add(const Element& loaded, float scaled_gradient, float* sums) const {
    rule_.Add(ToCompute(loaded.value), scaled_gradient, loaded.slots, sums);
  }

  __device__ void StartRow(const float* sums) {
    float* slots[kMaxSlots] = {};
    for (int k = 0; k < Rule::kRowSlots; ++k) slots[k] = slots_.wide(Rule::kElementSlots + k) + row_;
    of_row_ = RowStepInPlace(rule_, static_cast<float>(width_), sums, slots);
  }
  // For the threads that did not start the row.
  __device__ const Row& row() const { return of_row_; }
  __device__ void set_row(const Row& row) { of_row_ = row; }

  __device__ __forceinline__ void Update(int64_t element, Element loaded, float scaled_gradient) const {
    const float value = rule_.Step(ToCompute(loaded.value), scaled_gradient, of_row_, loaded.slots);
    for (int k = 0; k < Rule::kElementSlots; ++k) StoreSlot(k, element, loaded.slots[k]);
    if constexpr (std::is_same_v<T, float>)
      values_[element] = value;
    else
      rounding_.Store(value, element, values_ + element);
  }

 private:
  __device__ void StoreSlot(int slot, int64_t element, float value) const {
    const int64_t at = row_ * width_ + element;
    if (!slots_.narrow) {
      slots_.wide(slot)[at] = value;
      return;
    }
    const RowRounding rounding(seed_, SlotStream(stream_, slot), row_, rounding_.stochastic);
    rounding.Store(value, element, slots_.rounded(slot) + at);
  }

  const Rule rule_;
  const SlotArrays slots_;
  const int64_t width_, row_;
  T* const values_;
  const RowRounding rounding_;
  const uint32_t* const seed_;
  const uint64_t stream_;
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
