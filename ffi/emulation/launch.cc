#include "ffi/emulation/launch.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "ffi/emulation/machine.h"

namespace jax_tt::emulation {
namespace {

std::atomic<uint64_t> seed{0};
std::atomic<int64_t> launches{0};

struct Counts {
  std::mutex mutex;
  std::map<std::string, LaunchCount> by_kernel;
};

// Never destroyed: threads may launch until the process has gone.
Counts& TheCounts() {
  static Counts* const counts = new Counts;
  return *counts;
}

// "Kernel" of "... [with auto kKernel = space::Kernel<...>; ...]"; where there is no such text, the place.
std::string NameOf(const Place& place) {
  constexpr std::string_view kMark = "kKernel = ";
  std::string_view text = place.kernel == nullptr ? "" : place.kernel;
  const size_t mark = text.find(kMark);
  if (mark == std::string_view::npos) return Where(place.file, place.line);
  text.remove_prefix(mark + kMark.size());
  text = text.substr(0, text.find_first_of("<;]"));
  return std::string(text.substr(std::min(text.rfind(':') + 1, text.size())));
}

}  // namespace

void SetSeed(uint64_t value) { seed = value; }

int64_t Launches() { return launches; }

void CountLaunch(std::string_view kernel, int64_t blocks, int64_t threads) {
  Counts& counts = TheCounts();
  const std::lock_guard<std::mutex> lock(counts.mutex);
  LaunchCount& count = counts.by_kernel[std::string(kernel)];
  ++count.launches;
  count.blocks += blocks;
  count.threads += blocks * threads;
}

std::map<std::string, LaunchCount> LaunchCounts() {
  Counts& counts = TheCounts();
  const std::lock_guard<std::mutex> lock(counts.mutex);
  return counts.by_kernel;
}

void ClearLaunchCounts() {
  Counts& counts = TheCounts();
  const std::lock_guard<std::mutex> lock(counts.mutex);
  counts.by_kernel.clear();
}

Status CheckedRun(const Place& place, int64_t blocks, int threads, size_t shared_bytes, void (*call)(const void*),
                  const void* kernel) {
  const std::string launch = "the kernel launched at " + Where(place.file, place.line);
  if (blocks < 1 || blocks > INT32_MAX)
    return Internal(launch + " asks for " + std::to_string(blocks) + " blocks, the limit is 2147483647");
  if (threads < 1 || threads > kMaxThreads)
    return Internal(launch + " asks for " + std::to_string(threads) + " threads in a block, the limit is 1024");
  if (shared_bytes > static_cast<size_t>(kMaxShared))
    return Internal(launch + " asks for " + std::to_string(shared_bytes) +
                    " bytes of shared memory, the limit is 232448");
  ++launches;
  CountLaunch(NameOf(place), blocks, threads);
  std::string violation = RunGrid({blocks, threads, shared_bytes, call, kernel, seed});
  return violation.empty() ? Status{} : Internal(launch + ": " + std::move(violation));
}

}  // namespace jax_tt::emulation
