// What a kernel leaves for the host when it meets an id out of range with Bounds::kWarn.
#pragma once

#include <stdint.h>

namespace jax_tt {

// Lies in memory of the host that the device can write, and is written once: a program goes on meeting such ids.
struct Notice {
  static constexpr unsigned kFree = 0, kTaken = 1, kWritten = 2;

  unsigned state = kFree;
  int64_t id = 0, position = 0;
};

// In one array.
constexpr int kMaxNotices = 1024;

}  // namespace jax_tt
