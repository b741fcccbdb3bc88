// Adam with one second moment per row: v = b2 v + (1 - b2) mean(g^2); the rest as in adam.h.
#pragma once

#include "ffi/core/host_device.h"
#include "ffi/core/optimizers/moments.h"
#include "ffi/core/optimizers/row_math.h"

namespace jax_tt {

template <typename C>
struct PartialRowWiseAdam {
  static constexpr int kElementSlots = 1, kRowSlots = 1, kSums = 1;
  struct Row {
    C scale;  // of the first moment
  };

  Moments<C> moments;
  static constexpr const char* kHyperparameters = Moments<C>::kHyperparameters;

  JAX_TT_INLINE void Add(C, C g, const C*, C* sums) const { sums[0] += g * g; }
  JAX_TT_INLINE Row RowStep(C width, const C* sums, C* second) const {
    *second = moments.b2 * *second + (C{1} - moments.b2) * Mean(sums[0], width);
    return {moments.Scale(*second)};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C* first) const {
    *first = moments.First(*first, g);
    return w - moments.learning_rate * (*first * row.scale + moments.weight_decay * w);
  }
};

}  // namespace jax_tt
