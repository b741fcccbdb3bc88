// Launches of the emulator, and the few calls of the CUDA runtime that host launch code makes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "ffi/common/status.h"
#include "ffi/emulation/scheduler.h"

struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };

namespace jax_tt::emulation {

// What was launched since the counts were last cleared, by kernel.
struct LaunchCount {
  int64_t launches = 0, blocks = 0, threads = 0;
};
void CountLaunch(std::string_view kernel, int64_t blocks, int64_t threads);
std::map<std::string, LaunchCount> LaunchCounts();
void ClearLaunchCounts();

}  // namespace jax_tt::emulation

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  if (bytes != 0) memset(p, value, bytes);
  jax_tt::emulation::CountLaunch("memset", 0, 0);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (bytes != 0) memcpy(to, from, bytes);
  return cudaSuccess;
}

namespace jax_tt {
namespace emulation {

// Of the order of blocks and threads in every launch from here on; 0 is the natural order.
void SetSeed(uint64_t seed);

// Grids launched in this process so far.
int64_t Launches();

struct Place {
  const char *file, *kernel;
  int line;
};
Status CheckedRun(const Place& place, int64_t blocks, int threads, size_t shared_bytes, void (*call)(const void*),
                  const void* kernel);

}  // namespace emulation

// A stream together with the place of the launch, which names the kernel in messages.
struct LaunchSite {
  LaunchSite(cudaStream_t stream, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : stream(stream), file(file), line(line) {}
  cudaStream_t stream;
  const char* file;
  int line;
  const char* kernel = nullptr;  // a text with its name behind "kKernel = ", or null: it is counted by its place
};

inline void DoNothing() {}

// Runs `blocks` blocks of `threads` threads of kernel(args...), each block with `shared_bytes` of shared memory.
template <typename... Params, typename... Args>
Status Launch(LaunchSite site, int64_t blocks, int threads, size_t shared_bytes, void (*kernel)(Params...),
              Args&&... args) {
  if (blocks == 0) return Launch(site, 1, 1, 0, DoNothing);
  const std::tuple<Params...> params(std::forward<Args>(args)...);
  const auto thread = [kernel, &params] { std::apply(kernel, params); };
  return emulation::CheckedRun(
      {site.file, site.kernel, site.line}, blocks, threads, shared_bytes,
      [](const void* body) { (*static_cast<decltype(thread)*>(body))(); }, &thread);
}

template <typename... Params, typename... Args>
Status LaunchUnasked(LaunchSite site, int64_t blocks, int threads, size_t shared_bytes, void (*kernel)(Params...),
                     Args&&... args) {
  return Launch(site, blocks, threads, shared_bytes, kernel, std::forward<Args>(args)...);
}

}  // namespace jax_tt
