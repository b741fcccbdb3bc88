// What Launch asks of the CUDA runtime, on one that is made up; a line for everything that is not as it should be.
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "cuda_runtime.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {
namespace {

void First(int) {}
void Second(int) {}

void Expect(bool holds, const char* what) {
  if (!holds) printf("%s\n", what);
}

void LaunchNothing() {
  const int before = fake_cuda::driver.launches;
  Expect(Launch(nullptr, 0, 256, 0, First, 1).ok(), "a launch of no blocks fails");
  Expect(Launch(nullptr, 0, 256, size_t{100} << 10, First, 1).ok(), "a large launch of no blocks fails");
  Expect(fake_cuda::driver.launches == before + 2, "a launch of no blocks enqueues nothing");
}

// Threads that launch one kernel with sizes of their own, on two devices.
void LaunchInThreads() {
  const size_t sizes[] = {size_t{60} << 10, size_t{90} << 10, size_t{227} << 10, size_t{1} << 10};
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      fake_cuda::device = t / 4;
      for (int i = 0; i < 2000; ++i) failures += !Launch(nullptr, 1, 256, sizes[t % 4], i % 2 ? First : Second, i).ok();
    });
  }
  for (std::thread& thread : threads) thread.join();
  Expect(failures == 0, "threads that launch one kernel with several sizes fail each other");
  Expect(fake_cuda::driver.limits_set == 4, "the limit is not set once for each of two kernels on each of two devices");
}

void LaunchTooLarge() {
  Expect(!Launch(nullptr, 1, 256, size_t{228} << 10, First, 1).ok(), "a launch beyond the device's limit succeeds");
}

}  // namespace
}  // namespace jax_tt

int main() {
  jax_tt::LaunchNothing();
  jax_tt::LaunchInThreads();
  jax_tt::LaunchTooLarge();
  puts("done");
  return 0;
}
