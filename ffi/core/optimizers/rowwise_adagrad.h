// Row-wise Adagrad: s += mean(g^2) over the row; w -= lr g / (sqrt(s) + eps).
#ifndef JAX_TT_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_
#define JAX_TT_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_

#include "ffi/core/host_device.h"

namespace jax_tt {

template <typename C>
struct RowWiseAdagrad {
  static constexpr int kHyperparameters = 2;
  static constexpr int kElementSlots = 0;
  static constexpr bool kRowWise = true;

  C learning_rate, eps;

  JAX_TT_INLINE explicit RowWiseAdagrad(const float* hyper)
      : learning_rate(static_cast<C>(hyper[0])), eps(static_cast<C>(hyper[1])) {}
  // The step size of the whole row, from the mean square of its gradient.
  JAX_TT_INLINE C RowStep(C mean_square, float* sum) const {
    const C s = static_cast<C>(*sum) + mean_square;
    *sum = static_cast<float>(s);
    return s == C{0} ? C{0} : learning_rate / (SquareRoot(s) + eps);
  }
  JAX_TT_INLINE C Step(C w, C g, C row_step, float*, float*) const { return w - row_step * g; }
};

}  // namespace jax_tt

#endif  // JAX_TT_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_
