// The stream that a handler launches on.
#pragma once

#include <optional>

#include "ffi/cuda/simt.h"
#include "xla/ffi/api/ffi.h"

#if defined(JAX_TT_EMULATION)

namespace jax_tt {
// The emulator runs at once, on the thread that launches.
struct NoStream {};
using StreamContext = NoStream;
}  // namespace jax_tt

template <>
struct xla::ffi::CtxDecoding<jax_tt::NoStream> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return Type{nullptr};
  }
};

#else

namespace jax_tt {
using StreamContext = xla::ffi::PlatformStream<cudaStream_t>;
}  // namespace jax_tt

#endif  // JAX_TT_EMULATION
