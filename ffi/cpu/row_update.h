// The optimizer step of touched rows, which are slices of TT cores or rows of dense tables.
#pragma once

#include <stdint.h>

#include <cmath>
#include <type_traits>

#include "ffi/core/half.h"
#include "ffi/core/optimizers/exported_rule.h"
#include "ffi/core/optimizers/slot_arrays.h"
#include "ffi/core/stochastic.h"
#include "ffi/cpu/kernels/kernels.h"
#include "ffi/cpu/prefetch.h"

namespace jax_tt {

// An optimizer with the hyper-parameters of this step, for rows that are computed in type C.
template <typename C>
struct OptimizerStep {
  int kind = 0;
  OptimizerTraits traits{};
  const ExportedRule* exported = nullptr;  // null: a rule of the library
  const C* hyper = nullptr;                // [traits.hyperparameters]
  C gradient_scale = 1;                    // multiplies every gradient
  bool allowed = true;                     // otherwise nothing is changed, but *applied is still computed
  bool skip_nonfinite = false;             // skips the whole update if any gradient is not finite
  bool stochastic_rounding = false;        // of 16-bit storage
  uint32_t seed[2] = {};

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
  SlotArrays slots;
  int64_t width = 0;
  uint64_t stream = 0;  // distinguishes the random numbers of several tables

  // What Update will change of a row; every part of it may be a cache miss.
  void Prefetch(int64_t row, const OptimizerTraits& traits) const {
    PrefetchLines(values + row * width, width * static_cast<int64_t>(sizeof(T)));
    for (int k = 0; k < traits.slots(); ++k) {
      const int64_t size = SlotSize(traits, k);
      PrefetchLines(static_cast<const char*>(slots.data[k]) + row * size, size);
    }
  }

  // Elements of the scratch memory of an update.
  static int64_t ScratchSize(int64_t width) { return (1 + kMaxElementSlots) * width; }

  // `update`: step.update().  Only storage of 16 bits, of the table or of its slots, needs the scratch memory.
  void Update(int64_t row, const C* gradient, const OptimizerStep<C>& step, RowUpdate<C> update, C* scratch) const {
    T* stored = values + row * width;
    const OptimizerTraits& traits = step.traits;
    C* slot[kMaxSlots] = {};
    const int narrow = slots.narrow ? traits.element_slots : 0;
    for (int k = narrow; k < traits.slots(); ++k) slot[k] = slots.wide<C>(k) + row * traits.slot_width(k, width);
    for (int k = 0; k < narrow; ++k) {
      slot[k] = scratch + (1 + k) * width;
      for (int64_t i = 0; i < width; ++i) slot[k][i] = ToCompute(slots.rounded(k)[row * width + i]);
    }
    if constexpr (std::is_same_v<T, C>) {
      update(width, step.hyper, step.gradient_scale, gradient, stored, slot[0], slot[1], slot[2]);
    } else {
      for (int64_t i = 0; i < width; ++i) scratch[i] = ToCompute(stored[i]);
      update(width, step.hyper, step.gradient_scale, gradient, scratch, slot[0], slot[1], slot[2]);
      Store(scratch, step, stream, row, stored);
    }
    for (int k = 0; k < narrow; ++k) Store(slot[k], step, SlotStream(stream, k), row, slots.rounded(k) + row * width);
  }

 private:
  // Bytes that a slot has for a row.
  int64_t SlotSize(const OptimizerTraits& traits, int slot) const {
    const bool narrow = slots.narrow && slot < traits.element_slots;
    return traits.slot_width(slot, width) * static_cast<int64_t>(narrow ? sizeof(bfloat16) : sizeof(C));
  }
  template <typename Stored>
  void Store(const C* from, const OptimizerStep<C>& step, uint64_t own_stream, int64_t row, Stored* to) const {
    const RowRounding rounding(step.seed, own_stream, row, step.stochastic_rounding);
    for (int64_t i = 0; i < width; ++i) rounding.Store(static_cast<float>(from[i]), i, to + i);
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
