// LAMB: Adam's step r, with weight decay, is scaled by |w| / |r|, the norms being those of the row.
#pragma once

#include "ffi/core/host_device.h"
#include "ffi/core/optimizers/moments.h"
#include "ffi/core/optimizers/row_math.h"

namespace jax_tt {

template <typename C>
struct Lamb {
  static constexpr int kElementSlots = 2, kRowSlots = 0, kSums = 2;
  struct Row {
    C step_size;
  };

  Moments<C> moments;
  static constexpr const char* kHyperparameters = Moments<C>::kHyperparameters;

  // The sums of w^2 and r^2.  Keeping r from here to Step would take another buffer.
  JAX_TT_INLINE void Add(C w, C g, const C* slots, C* sums) const {
    const C r = Direction(w, moments.First(slots[0], g), moments.Second(slots[1], g));
    sums[0] += w * w;
    sums[1] += r * r;
  }
  JAX_TT_INLINE Row RowStep(C, const C* sums, C*) const {
    return {moments.learning_rate * NormRatio(sums[0], sums[1])};
  }
  JAX_TT_INLINE C Step(C w, C g, const Row& row, C* slots) const {
    slots[0] = moments.First(slots[0], g);
    slots[1] = moments.Second(slots[1], g);
    return w - row.step_size * Direction(w, slots[0], slots[1]);
  }

 private:
  JAX_TT_INLINE C Direction(C w, C first, C second) const {
    return first * moments.Scale(second) + moments.weight_decay * w;
  }
};

}  // namespace jax_tt
