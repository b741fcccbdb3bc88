// What device code and its checks know of the thread that runs: kept in thread-local words, rewritten at every switch.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/emulation/fast_tls.h"

namespace jax_tt::emulation {

struct Index {
  unsigned x;  // kernels here are one-dimensional
};

// When the running thread acts, in the units of the order that barriers make (order.h).
struct Now {
  uint32_t barrier;  // barriers of a whole block passed on this machine, over all blocks
  uint32_t start;    // that count when the block began: older marks belong to other blocks
  uint32_t full;     // synchronisations of the whole warp passed
  uint32_t clock;    // synchronisations of parts of the warp passed since the last whole one
  uint32_t warp;
  uint32_t lane_bit;
};

extern constinit thread_local Now now JAX_TT_FAST_TLS;

// Stops the launch: what is wrong reaches the caller of Launch, with the kernel, the block and the thread.
[[noreturn]] void Fail(const std::string& what);
// The same where the source line is known.
[[noreturn]] void Fail(const std::string& what, const char* file, int line);

}  // namespace jax_tt::emulation

extern constinit thread_local jax_tt::emulation::Index threadIdx JAX_TT_FAST_TLS;
extern constinit thread_local jax_tt::emulation::Index blockIdx JAX_TT_FAST_TLS;
extern constinit thread_local jax_tt::emulation::Index blockDim JAX_TT_FAST_TLS;
extern constinit thread_local jax_tt::emulation::Index gridDim JAX_TT_FAST_TLS;
