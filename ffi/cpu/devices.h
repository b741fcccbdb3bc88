// The devices of a process that run ops at the same time.
#pragma once

#include <stdint.h>

#include <array>
#include <atomic>
#include <chrono>

namespace jax_tt {

// How many devices have begun an op within the last 10 ms; `device` begins one now.  The devices of a mesh begin their
// part of an op at about the same time, so that the later ones know of the earlier ones.
inline int BusyDevices(int device) {
  using Clock = std::chrono::steady_clock;
  constexpr Clock::rep kWindow = std::chrono::duration_cast<Clock::duration>(std::chrono::milliseconds(10)).count();
  constexpr int kSlots = 64;  // devices whose numbers differ by a multiple of this count as one
  static std::array<std::atomic<Clock::rep>, kSlots> begun{};

  const Clock::rep now = Clock::now().time_since_epoch().count();
  begun[static_cast<uint32_t>(device) % kSlots].store(now, std::memory_order_relaxed);
  int busy = 0;
  for (const std::atomic<Clock::rep>& time : begun) busy += now - time.load(std::memory_order_relaxed) < kWindow;
  return busy;
}

}  // namespace jax_tt
