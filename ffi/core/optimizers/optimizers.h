// Every fused optimizer, by the number that Python knows it under.
//
// A rule is written once for a row of any table, dense rows and slices of TT cores alike.  Rule<C>, where C is the type
// that it computes in, has the numbers of its hyper-parameters, of its slots with one float per element and with one
// per row (a table has them in this order), and of the sums over a row that it needs.  The steps of one row are
//
//   Add(w, g, element slots, sums)       for every element: adds to the sums; nothing has changed yet
//   RowStep(width, sums, row slots)      once: changes the row slots, and returns the Row that Step reads
//   Step(w, g, row, element slots)       for every element: changes the element slots, and returns the new w
//
// Rules without sums have no Add; those without sums and row slots have no RowStep.  Row has only members of type C.
#ifndef JAX_TT_CORE_OPTIMIZERS_OPTIMIZERS_H_
#define JAX_TT_CORE_OPTIMIZERS_OPTIMIZERS_H_

#include <stdint.h>

#include "ffi/core/optimizers/adagrad.h"
#include "ffi/core/optimizers/adagrad_momentum.h"
#include "ffi/core/optimizers/adam.h"
#include "ffi/core/optimizers/counter_rowwise_adagrad.h"
#include "ffi/core/optimizers/cow_clip.h"
#include "ffi/core/optimizers/decayed_adam.h"
#include "ffi/core/optimizers/ftrl.h"
#include "ffi/core/optimizers/global_decay_rowwise_adagrad.h"
#include "ffi/core/optimizers/lamb.h"
#include "ffi/core/optimizers/lars_sgd.h"
#include "ffi/core/optimizers/partial_rowwise_adam.h"
#include "ffi/core/optimizers/partial_rowwise_lamb.h"
#include "ffi/core/optimizers/regularized_rowwise_adagrad.h"
#include "ffi/core/optimizers/rowwise_adagrad.h"
#include "ffi/core/optimizers/rowwise_corrected_adam.h"
#include "ffi/core/optimizers/rowwise_rmsprop.h"
#include "ffi/core/optimizers/sgd.h"

namespace jax_tt {

// In the order of `native_kind` in Python.
// clang-format off
#define JAX_TT_OPTIMIZERS(each) \
  each(Sgd) \
  each(Adagrad) \
  each(RowWiseAdagrad) \
  each(Adam) \
  each(PartialRowWiseAdam) \
  each(Lamb) \
  each(PartialRowWiseLamb) \
  each(LarsSgd) \
  each(RegularizedRowWiseAdagrad) \
  each(DecayedAdam) \
  each(RowWiseCorrectedAdam) \
  each(RowWiseRmsProp) \
  each(Ftrl) \
  each(AdagradMomentum) \
  each(CounterRowWiseAdagrad) \
  each(CowClip) \
  each(GlobalDecayRowWiseAdagrad)
// clang-format on

constexpr int kMaxSlots = 3;

struct OptimizerTraits {
  int hyperparameters, element_slots, row_slots;
  constexpr int slots() const { return element_slots + row_slots; }
  // Floats that a slot has for a row of `width` elements.
  constexpr int64_t slot_width(int slot, int64_t width) const { return slot < element_slots ? width : 1; }
};

template <template <typename> class Rule>
constexpr OptimizerTraits TraitsOf() {
  static_assert(Rule<float>::kElementSlots + Rule<float>::kRowSlots <= kMaxSlots);
  return {Rule<float>::kHyperparameters, Rule<float>::kElementSlots, Rule<float>::kRowSlots};
}

#define JAX_TT_TRAITS(Rule) TraitsOf<Rule>(),
constexpr OptimizerTraits kOptimizers[] = {JAX_TT_OPTIMIZERS(JAX_TT_TRAITS)};
#undef JAX_TT_TRAITS
constexpr int kNumOptimizers = sizeof(kOptimizers) / sizeof(kOptimizers[0]);

// Whether a rule has a RowStep.
template <typename Rule>
constexpr bool kStepsRows = Rule::kRowSlots > 0 || Rule::kSums > 0;

// Sizes of local arrays, which cannot be empty.
template <typename Rule>
constexpr int kElementSlotsOrOne = Rule::kElementSlots > 0 ? Rule::kElementSlots : 1;
template <typename Rule>
constexpr int kSumsOrOne = Rule::kSums > 0 ? Rule::kSums : 1;

// Takes the RowStep of a row with `row_slots`, one float each, in memory.
template <typename C, typename Rule>
JAX_TT_INLINE typename Rule::Row RowStepInPlace(const Rule& rule, C width, const C* sums, float* const* row_slots) {
  C slots[Rule::kRowSlots > 0 ? Rule::kRowSlots : 1] = {};
  for (int k = 0; k < Rule::kRowSlots; ++k) slots[k] = static_cast<C>(*row_slots[k]);
  const typename Rule::Row row = rule.RowStep(width, sums, slots);
  for (int k = 0; k < Rule::kRowSlots; ++k) *row_slots[k] = static_cast<float>(slots[k]);
  return row;
}

}  // namespace jax_tt

#endif  // JAX_TT_CORE_OPTIMIZERS_OPTIMIZERS_H_
