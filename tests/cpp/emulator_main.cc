// emulator_test right: every right kernel under many seeds, one line per failure.
// emulator_test planted: `seed name: message` for every planted bug under several seeds.
// emulator_test overflow: a write past the end of global memory.
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "ffi/cuda/simt.h"
#include "tests/cpp/emulator_test.h"

int main(int argc, char** argv) {
  using namespace jax_tt;
  if (argc != 2) return 2;
  if (strcmp(argv[1], "overflow") == 0) return OverflowGlobal().empty() ? 0 : 1;
  const bool right = strcmp(argv[1], "right") == 0;
  const EmulatorCase* const cases = right ? kRightCases : kPlantedCases;
  const int count = right ? kNumRightCases : kNumPlantedCases;
  for (uint64_t seed = 0; seed < (right ? 20u : 5u); ++seed) {
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
