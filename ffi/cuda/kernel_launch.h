// A kernel as a function that launches it, which another module may call: only the module that holds a kernel can
// launch it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <utility>

#include "ffi/common/status.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// What went wrong in the last launch of this thread.
inline std::string& LaunchTrouble() {
  static thread_local std::string what;
  return what;
}

// Returns null, or what went wrong, which stays until the next launch of the thread.
template <typename... Params>
using KernelLaunch = const char* (*)(cudaStream_t stream, int64_t blocks, const Params&... params);

// The KernelLaunch of a kernel, which always has as many threads and as much shared memory.
template <auto kKernel, int kThreads, size_t kShared, typename... Params>
const char* LaunchKernel(cudaStream_t stream, int64_t blocks, const Params&... params) {
  static_assert(kShared <= size_t{48} << 10);
  Status status = LaunchUnasked(stream, blocks, kThreads, kShared, kKernel, params...);
  if (status.ok()) return nullptr;
  LaunchTrouble() = std::move(status.message);
  return LaunchTrouble().c_str();
}

// What a KernelLaunch returned.
inline Status LaunchStatus(const char* what) { return what == nullptr ? Status{} : Internal(what); }

}  // namespace jax_tt
