// The devices that have begun an op lately, each of which counts once, and no longer after a while.
#include <stdio.h>

#include <chrono>
#include <thread>

#include "ffi/cpu/devices.h"

int main() {
  const auto begin = std::chrono::steady_clock::now();
  const int found[] = {jax_tt::BusyDevices(0), jax_tt::BusyDevices(0), jax_tt::BusyDevices(7), jax_tt::BusyDevices(0),
                       jax_tt::BusyDevices(-1)};
  const bool quick = std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(10);
  const int expected[] = {1, 1, 2, 2, 3};
  // A pause of this process may have made the first ones leave.
  for (int k = 0; k < 5 && quick; ++k)
    if (found[k] != expected[k]) return printf("%d devices, expected %d\n", found[k], expected[k]), 1;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (const int later = jax_tt::BusyDevices(3); later != 1) return printf("%d devices, expected 1\n", later), 1;
  puts("ok");
}
