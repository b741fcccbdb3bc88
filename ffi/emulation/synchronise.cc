// Barriers of the block and collectives of a warp.
#include <string>

#include "ffi/emulation/machine.h"

namespace jax_tt::emulation {
int Machine::Barrier(BarrierKind kind, int predicate, const char* file, int line) {
  Thread& self = threads_[current_];
  self.file = file;
  self.line = line;
  if (ended_ > 0) {
    int ended = 0;
    while (threads_[ended].state != State::kEnded) ++ended;
    Fail("divergent __syncthreads: " + Waiting(ended) + ", this one waits", file, line);
  }
  if (at_barrier_ == 0) {
    first_at_barrier_ = current_;
    barrier_kind_ = kind;
  } else if (const Thread& first = threads_[first_at_barrier_];
             first.line != line || first.file != file || barrier_kind_ != kind) {
    Fail("divergent __syncthreads: " + Waiting(first_at_barrier_) + ", this one waits", file, line);
  }
  predicates_ += predicate != 0;
  self.state = State::kAtBarrier;
  if (++at_barrier_ == grid_.threads) {
    const int result = kind == BarrierKind::kAnd  ? predicates_ == grid_.threads
                       : kind == BarrierKind::kOr ? predicates_ != 0
                                                  : predicates_;
    ++now.barrier;
    at_barrier_ = predicates_ = 0;
    uint16_t all[kMaxThreads];
    for (int i = 0; i < grid_.threads; ++i) {
      threads_[i].state = State::kReady;
      threads_[i].result = static_cast<uint64_t>(result);
      all[i] = static_cast<uint16_t>(i);
    }
    ready_.Add(all, grid_.threads);
  }
  Wait();
  return static_cast<int>(self.result);
}

uint64_t Machine::Collective(CollectiveKind kind, uint32_t mask, uint64_t value, uint32_t argument, int width,
                             const char* file, int line) {
  const int index = current_ / kWarp;
  const uint32_t lane_bit = now.lane_bit;
  Warp& warp = warps_[index];
  if ((mask & lane_bit) == 0)
    Fail(std::string(Name(kind)) + " with mask " + Hex(mask) + " without the lane itself", file, line);
  if (const uint32_t absent = mask & (~warp.present | warp.ended); absent != 0)
    Fail(std::string(Name(kind)) + " with mask " + Hex(mask) + " names absent lane " +
             std::to_string(__builtin_ctz(absent)),
         file, line);
  Thread& self = threads_[current_];
  self.file = file;
  self.line = line;
  self.mask = mask;
  self.value = value;
  self.argument = argument;
  self.width = width;
  self.state = State::kAtCollective;
  int i = 0;
  while (i < warp.gatherings && (warp.gathering[i].kind != kind || warp.gathering[i].mask != mask)) ++i;
  if (i == warp.gatherings) warp.gathering[warp.gatherings++] = {kind, mask, 0};
  warp.gathering[i].arrived |= lane_bit;
  if (warp.gathering[i].arrived == mask) {
    warp.gathering[i] = warp.gathering[--warp.gatherings];
    Complete(index, kind, mask);
  }
  Wait();
  return self.result;
}

// All lanes of the mask have come: gives each its result and orders what they did before.
void Machine::Complete(int index, CollectiveKind kind, uint32_t mask) {
  Warp& warp = warps_[index];
  const int first = index * kWarp;
  uint32_t ballot = 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (threads_[first + lane].value != 0) ballot |= uint32_t{1} << lane;
  }
  uint16_t lanes[kWarp];
  int n = 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    Thread& thread = threads_[first + lane];
    switch (kind) {
      case CollectiveKind::kSync:
        break;
      case CollectiveKind::kBallot:
        thread.result = ballot;
        break;
      case CollectiveKind::kAny:
        thread.result = ballot != 0;
        break;
      case CollectiveKind::kAll:
        thread.result = ballot == mask;
        break;
      default:
        thread.result = LaneResult(first, lane, kind, mask);
    }
    thread.state = State::kReady;
    lanes[n++] = static_cast<uint16_t>(first + lane);
  }
  if (mask == warp.present) {
    warp.order.SyncAll();
  } else {
    warp.order.SyncSome(mask);
  }
  ready_.Add(lanes, n);
}

// Results that differ from lane to lane: shuffles and matches.
uint64_t Machine::LaneResult(int first, int lane, CollectiveKind kind, uint32_t mask) {
  const Thread& thread = threads_[first + lane];
  if (kind == CollectiveKind::kMatchAny) {
    uint64_t equal = 0;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int other = __builtin_ctz(rest);
      if (threads_[first + other].value == thread.value) equal |= uint64_t{1} << other;
    }
    return equal;
  }
  if (thread.width < 1 || thread.width > kWarp || (thread.width & (thread.width - 1)) != 0)
    Fail(std::string(Name(kind)) + " with width " + std::to_string(thread.width), thread.file, thread.line);
  const int base = lane & ~(thread.width - 1), last = base + thread.width - 1;
  const int argument = static_cast<int>(thread.argument);
  int source = lane;
  if (kind == CollectiveKind::kShuffle) source = base + (argument & (thread.width - 1));
  if (kind == CollectiveKind::kShuffleUp && lane - argument >= base) source = lane - argument;
  if (kind == CollectiveKind::kShuffleDown && lane + argument <= last) source = lane + argument;
  if (kind == CollectiveKind::kShuffleXor && (lane ^ argument) <= last) source = lane ^ argument;
  if ((mask >> source & 1) == 0)
    Fail(std::string(Name(kind)) + ": lane " + std::to_string(lane) + " reads lane " + std::to_string(source) +
             ", which mask " + Hex(mask) + " leaves out",
         thread.file, thread.line);
  return threads_[first + source].value;
}

int BlockBarrier(BarrierKind kind, int predicate, const char* file, int line) {
  return ThisMachine().Barrier(kind, predicate, file, line);
}

uint64_t WarpCollective(CollectiveKind kind, uint32_t mask, uint64_t value, uint32_t argument, int width,
                        const char* file, int line) {
  return ThisMachine().Collective(kind, mask, value, argument, width, file, line);
}

}  // namespace jax_tt::emulation
