// One update rule, as the kernels of every platform take it.
//
// A rule is written once for a row of any table, dense rows and slices of TT cores alike.  Rule<C>, where C is the type
// that it computes in, is an aggregate of its hyper-parameters, fields of type C that JAX_TT_HYPERPARAMETERS declares
// and that Python gives by their names. It has the numbers of its slots with one number per element and with one per
// row (a table has them in this order), and of the sums over a row that it needs.  The steps of one row are
//
//   Add(w, g, element slots, sums)       for every element: adds to the sums; nothing has changed yet
//   RowStep(width, sums, row slots)      once: changes the row slots, and returns the Row that Step reads
//   Step(w, g, row, element slots)       for every element: changes the element slots, and returns the new w
//
// Rules without sums have no Add; those without sums and row slots have no RowStep.  Row has only members of type C.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "ffi/core/host_device.h"

namespace jax_tt {

// Declares the fields of a rule, and their names in this order.
#define JAX_TT_HYPERPARAMETERS(C, ...) \
  C __VA_ARGS__;                       \
  static constexpr const char* kHyperparameters = #__VA_ARGS__

constexpr int kMaxSlots = 3, kMaxElementSlots = 2;

struct OptimizerTraits {
  const char* names;  // of the hyper-parameters, with commas between them
  int hyperparameters, element_slots, row_slots;
  constexpr int slots() const { return element_slots + row_slots; }
  // Numbers that a slot has for a row of `width` elements.
  constexpr int64_t slot_width(int slot, int64_t width) const { return slot < element_slots ? width : 1; }
};

// The number of names in a list with commas between them.
constexpr int CountNames(const char* names) {
  int count = 1;
  for (; *names != '\0'; ++names) count += *names == ',';
  return count;
}

template <template <typename> class Rule>
constexpr OptimizerTraits TraitsOf() {
  using R = Rule<float>;
  static_assert(sizeof(R) == sizeof(float) * CountNames(R::kHyperparameters),
                "all fields of a rule are declared by JAX_TT_HYPERPARAMETERS, and have type C");
  static_assert(R::kElementSlots <= kMaxElementSlots, "a rule has at most two slots with a number per element");
  static_assert(R::kElementSlots + R::kRowSlots <= kMaxSlots, "a rule has at most three slots");
  return {R::kHyperparameters, sizeof(R) / sizeof(float), R::kElementSlots, R::kRowSlots};
}

template <typename Rule, typename C>
JAX_TT_INLINE Rule RuleOf(const C* hyper) {
  static_assert(std::is_aggregate_v<Rule> && std::is_standard_layout_v<Rule>,
                "a rule has no constructor, and no fields beside its hyper-parameters");
  Rule rule;
  C* fields = reinterpret_cast<C*>(&rule);
  for (int k = 0; k < static_cast<int>(sizeof(Rule) / sizeof(C)); ++k) fields[k] = hyper[k];
  return rule;
}

// Whether a rule has a RowStep.
template <typename Rule>
constexpr bool kStepsRows = Rule::kRowSlots > 0 || Rule::kSums > 0;

// Sizes of local arrays, which cannot be empty.
template <typename Rule>
constexpr int kElementSlotsOrOne = Rule::kElementSlots > 0 ? Rule::kElementSlots : 1;
template <typename Rule>
constexpr int kSumsOrOne = Rule::kSums > 0 ? Rule::kSums : 1;

// Takes the RowStep of a row with `row_slots`, one number each, in memory.
template <typename C, typename Rule>
JAX_TT_INLINE typename Rule::Row RowStepInPlace(const Rule& rule, C width, const C* sums, C* const* row_slots) {
  C slots[Rule::kRowSlots > 0 ? Rule::kRowSlots : 1] = {};
  for (int k = 0; k < Rule::kRowSlots; ++k) slots[k] = *row_slots[k];
  const typename Rule::Row row = rule.RowStep(width, sums, slots);
  for (int k = 0; k < Rule::kRowSlots; ++k) *row_slots[k] = slots[k];
  return row;
}

// One step of a row of n elements with gradient scale * g.  The slots of the row are in the order of the table's; those
// that a rule does not have are null.
template <typename C>
using RowUpdate = void (*)(int64_t n, const C* hyper, C scale, const C* g, C* w, C* slot0, C* slot1, C* slot2);

}  // namespace jax_tt
