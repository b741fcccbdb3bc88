// Every fused optimizer, by the number that Python knows it under.
//
// A rule is written once for a row of any table, dense rows and slices of TT cores alike.  It gives the number of its
// hyper-parameters and element-wise float slots, whether it keeps one float per row instead, and Step, the new value
// of an element.
#ifndef JAX_TT_CORE_OPTIMIZERS_OPTIMIZERS_H_
#define JAX_TT_CORE_OPTIMIZERS_OPTIMIZERS_H_

#include <stdint.h>

#include "ffi/core/optimizers/adagrad.h"
#include "ffi/core/optimizers/adam.h"
#include "ffi/core/optimizers/rowwise_adagrad.h"
#include "ffi/core/optimizers/sgd.h"

namespace jax_tt {

constexpr int kNumOptimizers = 4;

struct OptimizerTraits {
  int hyperparameters, element_slots;
  bool row_wise;
  constexpr int slots() const { return element_slots + (row_wise ? 1 : 0); }
};

template <template <typename> class Rule>
constexpr OptimizerTraits TraitsOf() {
  return {Rule<float>::kHyperparameters, Rule<float>::kElementSlots, Rule<float>::kRowWise};
}

constexpr OptimizerTraits kOptimizers[kNumOptimizers] = {TraitsOf<Sgd>(), TraitsOf<Adagrad>(),
                                                         TraitsOf<RowWiseAdagrad>(), TraitsOf<Adam>()};

}  // namespace jax_tt

#endif  // JAX_TT_CORE_OPTIMIZERS_OPTIMIZERS_H_
