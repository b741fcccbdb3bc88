// Sums and first candidates of a warp.  Every lane must call these.
#pragma once

#include <stdint.h>

#include "ffi/cuda/lanes.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// The first of two candidates, either of which may be none.  A candidate has
//   bool exists() const, bool Before(const Candidate&) const, and Candidate OfLane(int step) const,
// the one of the lane whose number differs by the bit `step`.
template <typename Candidate>
__device__ __forceinline__ Candidate Earlier(const Candidate& a, const Candidate& b) {
  return !b.exists() || (a.exists() && a.Before(b)) ? a : b;
}

template <typename Candidate>
__device__ __forceinline__ Candidate FirstOfWarp(Candidate candidate) {
  for (int step = 16; step > 0; step /= 2) candidate = Earlier(candidate, candidate.OfLane(step));
  return candidate;
}

__device__ __forceinline__ uint32_t SumOfWarp(uint32_t value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

}  // namespace jax_tt
