// Gradients of the cores and of the per-sample weights.
#pragma once

#include <algorithm>
#include <functional>

#include "ffi/common/status.h"
#include "ffi/cpu/tt/forward.h"
#include "ffi/cpu/tt/problem.h"

namespace jax_tt {

// The destination of gradients: arrays, or a consumer that is called for each slice.
//
// In the arrays, only gradients of slices with touched = 1 are written.  A consumer gets the gradient of each slice
// once, when that slice of the core is no longer read; it can only be used for a batch of one chunk.
template <typename C>
struct CoreGradients {
  C* gradient[kMaxCores] = {};       // as the cores
  int32_t* touched[kMaxCores] = {};  // [p_k], cleared by TTBackward
  std::function<void(int core, int64_t slice, const C* gradient, int worker)> consume;
};

// Hands over the gradient of a slice, given in the orientation of its chain.  scratch: as large as the slice.
template <typename C>
void DeliverGradient(const TTShape& shape, const Side& side, int position, int64_t slice, const C* gradient,
                     const CoreGradients<C>& gradients, C* scratch, int worker) {
  const int core = side.core[position];
  const int64_t size = shape.slice_size(core);
  if (!side.left) {
    RestoreSlice(shape, side, position, gradient, scratch);
    gradient = scratch;
  }
  if (gradients.consume) return gradients.consume(core, slice, gradient, worker);
  C* sum = gradients.gradient[core] + slice * size;
  int32_t& touched = gradients.touched[core][slice];
  if (touched)
    for (int64_t i = 0; i < size; ++i) sum[i] += gradient[i];
  else
    std::copy_n(gradient, size, sum);
  touched = 1;
}

// out_gradient: [groups * bags, dim].  saved: what TTForward saved, or null.  weight_gradient: [n], or null.
template <typename T>
Status TTBackward(const TTProblem<T>& problem, const Pool& pool, const typename TTProblem<T>::C* out_gradient,
                  const typename TTProblem<T>::C* saved, const CoreGradients<typename TTProblem<T>::C>& gradients,
                  typename TTProblem<T>::C* weight_gradient);

// Sets the gradients of slices that no lookup touched to zero.
template <typename C>
void ClearUntouched(const TTShape& shape, const Pool& pool, const CoreGradients<C>& gradients) {
  Phases phases;
  for (int k = 0; k < shape.d; ++k) {
    phases.AddBlocks(shape.p[k], 64, [&shape, &gradients, k](int64_t slice, int64_t end, int) {
      for (; slice < end; ++slice)
        if (!gradients.touched[k][slice])
          std::fill_n(gradients.gradient[k] + slice * shape.slice_size(k), shape.slice_size(k), C{0});
    });
  }
  pool.Run(phases);
}

}  // namespace jax_tt
