#include "ffi/cuda/emulation/launch.h"

#include <atomic>
#include <string>

#include "ffi/cuda/emulation/machine.h"

namespace jax_tt::emulation {
namespace {

std::atomic<uint64_t> seed{0};
std::atomic<int64_t> launches{0};

}  // namespace

void SetSeed(uint64_t value) { seed = value; }

int64_t Launches() { return launches; }

Status CheckedRun(const char* file, int line, int64_t blocks, int threads, size_t shared_bytes,
                  void (*call)(const void*), const void* kernel) {
  const std::string launch = "the kernel launched at " + Where(file, line);
  if (blocks < 1 || blocks > INT32_MAX)
    return Internal(launch + " asks for " + std::to_string(blocks) + " blocks, the limit is 2147483647");
  if (threads < 1 || threads > kMaxThreads)
    return Internal(launch + " asks for " + std::to_string(threads) + " threads in a block, the limit is 1024");
  if (shared_bytes > static_cast<size_t>(kMaxShared))
    return Internal(launch + " asks for " + std::to_string(shared_bytes) +
                    " bytes of shared memory, the limit is 232448");
  ++launches;
  std::string violation = RunGrid({blocks, threads, shared_bytes, call, kernel, seed});
  return violation.empty() ? Status{} : Internal(launch + ": " + std::move(violation));
}

}  // namespace jax_tt::emulation
