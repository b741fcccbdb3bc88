// The optimizer step of one element of a table, a slice of a TT core being a row.
#ifndef JAX_TT_CUDA_TABLE_STEP_H_
#define JAX_TT_CUDA_TABLE_STEP_H_

#include <stdint.h>

#include <type_traits>

#include "ffi/core/optimizers/optimizers.h"
#include "ffi/core/stochastic.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// Rows of `width` elements with their slots, changed in place.
template <typename T>
struct TableRows {
  T* values = nullptr;
  float* slots[2] = {};
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

// One row's step.  Row-wise rules are given the mean square of the scaled gradient by StartRow, called once per row.
template <typename T, template <typename> class Rule>
class RowStep {
 public:
  __device__ RowStep(const TableRows<T>& table, const StepNumbers& step, int64_t row)
      : table_(table),
        rule_(step.hyper),
        rounding_(step.seed, table.stream, row, step.stochastic_rounding),
        row_(row) {}

  __device__ void StartRow(float mean_square) {
    if constexpr (Rule<float>::kRowWise) row_step_ = rule_.RowStep(mean_square, table_.slots[0] + row_);
  }
  // For the threads that did not start the row.
  __device__ float row_step() const { return row_step_; }
  __device__ void set_row_step(float row_step) { row_step_ = row_step; }

  __device__ void Update(int64_t element, float scaled_gradient) {
    const int64_t at = row_ * table_.width + element;
    float* const slot0 = Rule<float>::kElementSlots > 0 ? table_.slots[0] + at : nullptr;
    float* const slot1 = Rule<float>::kElementSlots > 1 ? table_.slots[1] + at : nullptr;
    const float value = rule_.Step(ToCompute(table_.values[at]), scaled_gradient, row_step_, slot0, slot1);
    if constexpr (std::is_same_v<T, float>)
      table_.values[at] = value;
    else
      rounding_.Store(value, element, table_.values + at);
  }

 private:
  const TableRows<T>& table_;
  const Rule<float> rule_;
  const RowRounding rounding_;
  const int64_t row_;
  float row_step_ = 0;
};

template <template <typename> class Rule_>
struct RuleTag {
  template <typename C>
  using Rule = Rule_<C>;
};
// Calls body(tag) with the tag of the rule of that number; the number is known to be one of kOptimizers.
template <typename Body>
auto DispatchRule(int kind, Body&& body) {
  static_assert(kNumOptimizers == 4, "a rule is missing below");
  switch (kind) {
    case 0:
      return body(RuleTag<Sgd>{});
    case 1:
      return body(RuleTag<Adagrad>{});
    case 2:
      return body(RuleTag<RowWiseAdagrad>{});
    default:
      return body(RuleTag<Adam>{});
  }
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TABLE_STEP_H_
