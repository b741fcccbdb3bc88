// The launches of a rule that was compiled outside the library.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <type_traits>

#include "ffi/core/optimizers/exported_rule.h"
#include "ffi/cuda/dense/step.h"
#include "ffi/cuda/tt/step.h"

namespace jax_tt {

// Differs where the kernels of an extension would misread what they are given.  What changes the meaning of arguments
// and no size raises kRuleAbi.
constexpr uint64_t LaunchLayout() {
  uint64_t layout = kRuleAbi;
  for (const size_t size : {sizeof(TableList<GradientTable>), sizeof(DensePlan), sizeof(SumAndStepArgs<float>),
                            sizeof(StepArgsOf<float>), sizeof(TablesOnDevice)})
    layout = layout * 1000003 + size;
#if defined(JAX_TT_EMULATION)
  layout = ~layout;  // emulated kernels cannot run on a GPU, nor those of a GPU in an emulation
#endif
  return layout;
}

struct RuleLaunches {
  uint64_t layout;
  DenseLaunches dense;
  SliceLaunches slices_float32, slices_bfloat16, slices_float16;

  template <typename T>
  const SliceLaunches& slices() const {
    if constexpr (std::is_same_v<T, bfloat16>)
      return slices_bfloat16;
    else if constexpr (std::is_same_v<T, float16>)
      return slices_float16;
    else
      return slices_float32;
  }
};

}  // namespace jax_tt
