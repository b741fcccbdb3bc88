// The step of one row by a rule, for the instruction set that it is compiled for.
//
// It includes no standard library template, for the reason that kernels_isa.cc gives.
#pragma once

#include <stdint.h>

#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

// The slots of one element.
template <typename T, int N>
struct ElementSlots {
  T value[N > 0 ? N : 1] = {};

  __attribute__((always_inline)) ElementSlots(const T* slot0, const T* slot1, int64_t i) {
    if constexpr (N > 0) value[0] = slot0[i];
    if constexpr (N > 1) value[1] = slot1[i];
  }
  __attribute__((always_inline)) void Store(T* slot0, T* slot1, int64_t i) const {
    if constexpr (N > 0) slot0[i] = value[0];
    if constexpr (N > 1) slot1[i] = value[1];
  }
};

// A long row is added up in so many partial sums, since additions to one number wait for each other. Their order is the
// same in all instruction sets.
constexpr int kSumLanes = 16;

template <typename T, typename Rule>
static inline __attribute__((always_inline)) void SumRow(const Rule& rule, int64_t n, T scale, const T* g, const T* w,
                                                         const T* slot0, const T* slot1, T* sums) {
  using Slots = ElementSlots<T, Rule::kElementSlots>;
  int64_t i = 0;
  if (n >= 2 * kSumLanes) {
    T lanes[Rule::kSums][kSumLanes] = {};
    for (; i + kSumLanes <= n; i += kSumLanes) {
      for (int lane = 0; lane < kSumLanes; ++lane) {
        T own[Rule::kSums] = {};
        rule.Add(w[i + lane], scale * g[i + lane], Slots(slot0, slot1, i + lane).value, own);
        for (int k = 0; k < Rule::kSums; ++k) lanes[k][lane] += own[k];
      }
    }
    for (int k = 0; k < Rule::kSums; ++k) {
      for (int half = kSumLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[k][lane] += lanes[k][lane + half];
      sums[k] = lanes[k][0];
    }
  }
  for (; i < n; ++i) rule.Add(w[i], scale * g[i], Slots(slot0, slot1, i).value, sums);
}

// Of internal linkage: every instruction set has its own.
template <typename T, template <typename> class Rule_>
static void UpdateRow(int64_t n, const T* hyper, T scale, const T* __restrict g, T* __restrict w, T* __restrict slot0,
                      T* __restrict slot1, T* __restrict slot2) {
  using Rule = Rule_<T>;
  using Slots = ElementSlots<T, Rule::kElementSlots>;
  static_assert(kMaxElementSlots == 2 && kMaxSlots == 3);
  const Rule rule = RuleOf<Rule>(hyper);
  typename Rule::Row row = {};
  if constexpr (kStepsRows<Rule>) {
    T sums[kSumsOrOne<Rule>] = {};
    if constexpr (Rule::kSums > 0) SumRow(rule, n, scale, g, w, slot0, slot1, sums);
    T* const slots[kMaxSlots] = {slot0, slot1, slot2};
    row = RowStepInPlace(rule, static_cast<T>(n), sums, slots + Rule::kElementSlots);
  }
  for (int64_t i = 0; i < n; ++i) {
    Slots slots(slot0, slot1, i);
    w[i] = rule.Step(w[i], scale * g[i], row, slots.value);
    slots.Store(slot0, slot1, i);
  }
}

}  // namespace jax_tt
