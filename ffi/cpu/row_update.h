// The optimizer step of touched rows, which are slices of TT cores or rows of dense tables.
#ifndef JAX_TT_CPU_ROW_UPDATE_H_
#define JAX_TT_CPU_ROW_UPDATE_H_

#include <stdint.h>

#include <cmath>
#include <type_traits>

#include "ffi/common/half.h"
#include "ffi/core/optimizers/exported_rule.h"
#include "ffi/core/stochastic.h"
#include "ffi/cpu/kernels/kernels.h"
#include "ffi/cpu/prefetch.h"

namespace jax_tt {

// An optimizer with the hyper-parameters of this step.
struct OptimizerStep {
  int kind = 0;
  OptimizerTraits traits{};
  const ExportedRule* exported = nullptr;  // null: a rule of the library
  const float* hyper = nullptr;            // [traits.hyperparameters]
  float gradient_scale = 1;                // multiplies every gradient
  bool allowed = true;                     // otherwise nothing is changed, but *applied is still computed
  bool skip_nonfinite = false;             // skips the whole update if any gradient is not finite
  bool stochastic_rounding = false;        // of 16-bit storage
  uint32_t seed[2] = {};

  // The rule, for rows that are computed in this type.
  template <typename C>
  RowUpdate<C> update() const {
    if (exported == nullptr) return GetKernels<C>().update[kind];
    if constexpr (std::is_same_v<C, float>)
      return exported->update_float;
    else
      return exported->update_double;
  }
};

// A table of rows of `width` elements with its slots, updated in place.
template <typename T>
struct RowTable {
  using C = typename ComputeType<T>::type;

  T* values = nullptr;
  float* slots[kMaxSlots] = {};
  int64_t width = 0;
  uint64_t stream = 0;  // distinguishes the random numbers of several tables

  // What Update will change of a row; every part of it may be a cache miss.
  void Prefetch(int64_t row, const OptimizerTraits& traits) const {
    PrefetchLines(values + row * width, width * static_cast<int64_t>(sizeof(T)));
    for (int k = 0; k < traits.slots(); ++k) {
      const int64_t slot_width = traits.slot_width(k, width);
      PrefetchLines(slots[k] + row * slot_width, slot_width * static_cast<int64_t>(sizeof(float)));
    }
  }

  // `update`: step.update<C>().  `scratch` holds `width` elements; only 16-bit storage uses it.
  void Update(int64_t row, const C* gradient, const OptimizerStep& step, RowUpdate<C> update, C* scratch) const {
    T* stored = values + row * width;
    const OptimizerTraits& traits = step.traits;
    float* slot[kMaxSlots] = {};
    for (int k = 0; k < traits.slots(); ++k) slot[k] = slots[k] + row * traits.slot_width(k, width);
    const C scale = static_cast<C>(step.gradient_scale);
    if constexpr (std::is_same_v<T, C>) {
      update(width, step.hyper, scale, gradient, stored, slot[0], slot[1], slot[2]);
    } else {
      for (int64_t i = 0; i < width; ++i) scratch[i] = ToCompute(stored[i]);
      update(width, step.hyper, scale, gradient, scratch, slot[0], slot[1], slot[2]);
      const RowRounding rounding(step.seed, stream, row, step.stochastic_rounding);
      for (int64_t i = 0; i < width; ++i) rounding.Store(scratch[i], i, stored + i);
    }
  }
};

// Whether all of scale * values are finite.
template <typename C>
bool AllFinite(const C* values, int64_t n, C scale) {
  // A sum of products with zero is zero unless one of them is infinite or NaN.
  C probe = 0;
  for (int64_t i = 0; i < n; ++i) probe += (scale * values[i]) * C{0};
  return probe == C{0};
}

}  // namespace jax_tt

#endif  // JAX_TT_CPU_ROW_UPDATE_H_
