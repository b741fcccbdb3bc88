// Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, Algorithm 2):
// w -= lr (sign(b1 m + (1 - b1) g) + wd w); m = b2 m + (1 - b2) g.
#pragma once

#include "jax_tt/rule.h"

namespace lion_rule {

template <typename C>
struct Lion {
  static constexpr int kElementSlots = 1, kRowSlots = 0, kSums = 0;
  struct Row {};

  JAX_TT_HYPERPARAMETERS(C, learning_rate, b1, b2, weight_decay);

  JAX_TT_INLINE C Step(C w, C g, const Row&, C* momentum) const {
    const C direction = b1 * *momentum + (C{1} - b1) * g;
    const C sign = direction > C{0} ? C{1} : direction < C{0} ? C{-1} : C{0};
    *momentum = b2 * *momentum + (C{1} - b2) * g;
    return w - learning_rate * (sign + weight_decay * w);
  }
};

}  // namespace lion_rule
