// Cases of the emulator's test: a right kernel gives no message, a planted bug gives the launch's.
#pragma once

#include <string>

namespace jax_tt {

struct EmulatorCase {
  const char* name;
  std::string (*run)();
};

extern const EmulatorCase kRightCases[];
extern const int kNumRightCases;
extern const EmulatorCase kPlantedCases[];
extern const int kNumPlantedCases;

// A write past the end of global memory, which is for the address sanitizer to find.
std::string OverflowGlobal();

}  // namespace jax_tt
