// LAMB with one second moment per row: v = b2 v + (1 - b2) mean(g^2); the rest as in lamb.h.
#pragma once

#include "ffi/core/host_device.h"
#include "ffi/core/optimizers/moments.h"
#include "ffi/core/optimizers/row_math.h"

namespace jax_tt {

template <typename C>
struct PartialRowWiseLamb {
  static constexpr int kElementSlots = 1, kRowSlots = 1, kSums = 4;
  struct Row {
    C scale;  // of the first moment
    C step_size;
  };

  Moments<C> moments;
  static constexpr const char* kHyperparameters = Moments<C>::kHyperparameters;

  // The scale of the step r = scale m + weight_decay w is known only after the sum of g^2, so that the norm of r is put
  // together from the products of m and w.
  JAX_TT_INLINE void Add(C w, C g, const C* slots, C* sums) const {
    const C m = moments.First(slots[0], g);
    sums[0] += g * g;
    sums[1] += w * w;
    sums[2] += m * w;
    sums[3] += m * m;
  }
  JAX_TT_INLINE Row RowStep(C width, const C* sums, C* second) const {
    *second = moments.b2 * *second + (C{1} - moments.b2) * Mean(sums[0], width);
    const C scale = moments.Scale(*second);
    const C squares = SquaredNorm(scale, sums[3], moments.weight_decay, sums[1], sums[2]);
    return {scale, moments.learning_rate * NormRatio(sums[1], squares)};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C* first) const {
    *first = moments.First(*first, g);
    return w - row.step_size * (*first * row.scale + moments.weight_decay * w);
  }
};

}  // namespace jax_tt
