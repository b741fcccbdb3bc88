// emulator_test right: every right kernel under several seeds, one line per failure.
// emulator_test planted: `seed name: message` for every planted bug under several seeds.
// emulator_test threads: all of them in several OS threads at once.
// emulator_test overflow: a write past the end of global memory.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "ffi/cuda/simt.h"
#include "tests/cpp/emulator_test.h"

namespace jax_tt {
namespace {

// Launches of several OS threads at once, as XLA makes them; each has an emulator of its own, which ends with it.
int RunInThreads() {
  std::atomic<int> failures{0};
  emulation::SetSeed(1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&failures] {
      for (int i = 0; i < kNumRightCases; ++i) {
        // Orders compares the seeds of successive calls, which is a matter for one thread.
        if (strcmp(kRightCases[i].name, "orders") != 0) failures += !kRightCases[i].run().empty();
      }
      for (int i = 0; i < kNumPlantedCases; ++i) failures += kPlantedCases[i].run().empty();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

}  // namespace
}  // namespace jax_tt

int main(int argc, char** argv) {
  using namespace jax_tt;
  if (argc != 2) return 2;
  if (strcmp(argv[1], "overflow") == 0) return OverflowGlobal().empty() ? 0 : 1;
  if (strcmp(argv[1], "threads") == 0) return RunInThreads() == 0 ? 0 : 1;
  const bool right = strcmp(argv[1], "right") == 0;
  const EmulatorCase* const cases = right ? kRightCases : kPlantedCases;
  const int count = right ? kNumRightCases : kNumPlantedCases;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    emulation::SetSeed(seed);
    for (int i = 0; i < count; ++i) {
      const std::string message = cases[i].run();
      if (!right || !message.empty()) printf("%d %s: %s\n", static_cast<int>(seed), cases[i].name, message.c_str());
      fflush(stdout);  // what came before a crash
    }
  }
  puts("done");
  return 0;
}
