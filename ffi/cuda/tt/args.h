// A TT table and a batch as the kernels get them.
#pragma once

#include <stdint.h>

#include "ffi/core/half.h"
#include "ffi/core/lookups.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cuda/tables/list.h"
#include "ffi/cuda/tt_plan/plan.h"

namespace jax_tt {

template <typename T>
struct TTArgs {
  TTShape shape;
  CudaPlan layout;
  PlanRef plan;
  const T* cores[kMaxCores] = {};
  const float* weights = nullptr;    // [n], or null for ones
  const int32_t* offsets = nullptr;  // [groups, bags + 1]
  int64_t groups = 0, capacity = 0, bags = 0;
  bool tensor_float32 = false;  // whether float32 products may round their factors to TF32

  int64_t out_size() const { return groups * bags * shape.dim(); }
};

// Rows are worked on in chunks, so that no buffer grows with the batch: [begin, end) of all of them.
struct RowChunk {
  int64_t begin = 0, end = 0;
  JAX_TT_INLINE bool holds(int64_t row) const { return row >= begin && row < end; }
};

// Words that a pass sets to zero, for the launches that follow to count in.
struct Cleared {
  int32_t* words = nullptr;
  int64_t count = 0;

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)
  __device__ __forceinline__ void Clear(const BlockOfTable& block) const {
    for (int64_t i = block.index * blockDim.x + threadIdx.x; i < count; i += block.count * blockDim.x) words[i] = 0;
  }
#endif
};

}  // namespace jax_tt
