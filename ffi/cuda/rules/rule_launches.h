// The launches of an update rule, of the library or of an extension.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "ffi/common/status.h"
#include "ffi/core/half.h"

namespace jax_tt {

struct DenseLaunches;  // ffi/cuda/dense/step.h
struct SliceLaunches;  // ffi/cuda/tt/step.h

struct RuleLaunches {
  uint64_t layout;  // differs where the kernels of an extension would misread what they are given
  const DenseLaunches* dense;
  const SliceLaunches *slices_float32, *slices_bfloat16, *slices_float16;

  template <typename T>
  const SliceLaunches& slices() const {
    if constexpr (std::is_same_v<T, bfloat16>)
      return *slices_bfloat16;
    else if constexpr (std::is_same_v<T, float16>)
      return *slices_float16;
    else
      return *slices_float32;
  }
};

// An error where an extension has none for this module.
Status FindLaunches(int kind, const RuleLaunches** launches);

}  // namespace jax_tt
