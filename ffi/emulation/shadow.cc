#include "ffi/emulation/shadow.h"

#include <algorithm>
#include <string>

#include "ffi/emulation/scheduler.h"

namespace jax_tt::emulation {
namespace {

std::string Element(const Region& region, int64_t index) {
  return "element " + std::to_string(index) + " of shared array " + std::to_string(region.number) + " (" +
         std::to_string(region.count) + " elements of " + std::to_string(region.element_size) + " bytes)";
}

std::string Threads(const Accesses& accesses) {
  if (accesses.warp == Accesses::kManyWarps) return "threads of several warps";
  for (int lane = 0; lane < kWarp; ++lane) {
    const uint32_t bit = uint32_t{1} << lane;
    if ((accesses.lanes & bit) != 0 && bit != (accesses.warp == now.warp ? now.lane_bit : 0))
      return "thread " + std::to_string(accesses.warp * kWarp + lane);
  }
  return "another thread";
}

}  // namespace

bool OrderedWithinWarp(const Accesses& accesses) {
  const WarpOrder& order = CurrentWarpOrder();
  const int lane = __builtin_ctz(now.lane_bit);
  for (uint32_t rest = accesses.lanes & ~now.lane_bit; rest != 0; rest &= rest - 1) {
    if (accesses.clock >= order.Seen(lane, __builtin_ctz(rest))) return false;
  }
  return true;
}

// Of lanes at different clocks only the least is kept: an access may then count as ordered that is not, never the
// other way round.  This takes overlapping partial masks of one warp, and no false alarm is worth that case.
void MergeAccess(Accesses& accesses, bool atomic) {
  accesses.atomic = atomic;
  if (accesses.warp != now.warp) {
    accesses.warp = Accesses::kManyWarps;
  } else {
    accesses.lanes |= now.lane_bit;
    accesses.clock = static_cast<uint16_t>(std::min<uint32_t>(accesses.clock, now.clock));
  }
}

void FailBounds(const Region* region, int64_t index, int64_t count) {
  if (region == nullptr) Fail("uses a Shared pointer that points at nothing");
  std::string what = "out of bounds: " + Element(*region, index);
  if (count > 1) what += ", " + std::to_string(count) + " elements at once";
  Fail(what);
}

void FailUninitialised(const Region& region, int64_t index) {
  Fail("reads uninitialised shared memory: " + Element(region, index));
}

void FailRace(const Region& region, int64_t index, const char* mine, const Accesses& other, const char* others) {
  Fail("race: " + std::string(mine) + " " + Element(region, index) + ", which " + Threads(other) + " " + others +
       (other.atomic ? " atomically" : "") + " with no barrier between");
}

}  // namespace jax_tt::emulation
