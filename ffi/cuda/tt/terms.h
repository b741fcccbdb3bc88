// Sums of lines, weighted: what rows and bags have in common.
#pragma once

#include <stdint.h>

#include "ffi/core/exact_sum.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// One term: weight times a line, or nothing where the line is negative.
struct Term {
  int32_t line = -1;
  float weight = 0;
};

// Columns of a line as a lane has them.
template <int kWidth>
struct Columns {
  float value[kWidth] = {};

  __device__ __forceinline__ void Load(const float* from) {
    if constexpr (kWidth == 4) {
      const float4 four = Load4(from);
      value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
    } else {
      value[0] = *from;
    }
  }
  __device__ __forceinline__ void Store(float* to) const {
    if constexpr (kWidth == 4)
      Store4(to, make_float4(value[0], value[1], value[2], value[3]));
    else
      *to = value[0];
  }
  __device__ __forceinline__ void Add(float weight, const Columns& other) {
    for (int i = 0; i < kWidth; ++i) value[i] = fmaf(weight, other.value[i], value[i]);
  }
};

// Adds up terms [begin, end) of the columns at `from`, in order, whose lines are `dim` apart.  kAhead lines are
// loaded at once; term(i) may be called for those before their turn.
template <int kAhead, int kWidth, typename TermAt>
__device__ __forceinline__ void AddTerms(const float* from, int64_t dim, int64_t begin, int64_t end, TermAt term,
                                         Columns<kWidth>& sum) {
  for (int64_t base = begin; base < end; base += kAhead) {
    Term terms[kAhead];
    Columns<kWidth> lines[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (base + k < end) terms[k] = term(base + k);
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (terms[k].line >= 0) lines[k].Load(from + terms[k].line * dim);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (terms[k].line >= 0)
        sum.Add(terms[k].weight, lines[k]);
      else
        for (float& value : sum.value) value += terms[k].weight;  // zero, or NaN
    }
  }
}

}  // namespace jax_tt
