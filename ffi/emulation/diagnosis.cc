// Messages, and what they tell of threads that wait in vain.
#include <string>
#include <string_view>

#include "ffi/emulation/machine.h"

namespace jax_tt::emulation {

std::string Hex(uint32_t mask) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += kDigits[mask >> shift & 15];
  return text;
}

const char* Name(CollectiveKind kind) {
  static constexpr const char* kNames[] = {"__syncwarp",       "__shfl_sync",     "__shfl_up_sync",
                                           "__shfl_down_sync", "__shfl_xor_sync", "__ballot_sync",
                                           "__any_sync",       "__all_sync",      "__match_any_sync"};
  return kNames[static_cast<int>(kind)];
}

std::string Where(const char* file, int line) {
  std::string_view path = file;
  const size_t slash = path.rfind('/');
  const size_t folder = slash == 0 || slash == path.npos ? path.npos : path.rfind('/', slash - 1);
  if (folder != path.npos) path.remove_prefix(folder + 1);
  return std::string(path) + ":" + std::to_string(line);
}

// What a thread waits at, for messages.
std::string Machine::Waiting(int thread) const {
  const Thread& it = threads_[thread];
  const std::string who = "thread " + std::to_string(thread);
  switch (it.state) {
    case State::kEnded:
      return who + " has ended";
    case State::kAtBarrier:
      return who + " waits at __syncthreads of " + Where(it.file, it.line);
    case State::kAtCollective:
      return who + " waits at the warp collective of " + Where(it.file, it.line) + " with mask " + Hex(it.mask);
    case State::kReady:
      break;
  }
  return who + " has not come yet";
}

// The running thread has returned from the kernel.
void Machine::CheckEnd() {
  threads_[current_].state = State::kEnded;
  ++ended_;
  Warp& warp = warps_[current_ / kWarp];
  warp.ended |= now.lane_bit;
  if (at_barrier_ > 0) Fail("divergent __syncthreads: " + Waiting(first_at_barrier_) + ", this one has ended");
  for (int i = 0; i < warp.gatherings; ++i) {
    const Gathering& gathering = warp.gathering[i];
    if ((gathering.mask & now.lane_bit) != 0)
      Fail("ended while " + Waiting(current_ / kWarp * kWarp + __builtin_ctz(gathering.arrived)) +
           ", which names this one");
  }
}

// No thread can run: somebody waits for what never comes.
void Machine::StopStalled() {
  std::string what = "deadlock";
  for (const Warp& warp : warps_) {
    if (&warp - warps_ >= (grid_.threads + kWarp - 1) / kWarp) break;
    if (warp.gatherings == 0) continue;
    const Gathering& gathering = warp.gathering[0];
    const int first = static_cast<int>(&warp - warps_) * kWarp;
    Fail(what + ": " + Waiting(first + __builtin_ctz(gathering.arrived)) + ", while " +
         Waiting(first + __builtin_ctz(gathering.mask & ~gathering.arrived)));
  }
  Fail(what);
}

void Machine::StopAfterLastWait(std::string violation) {
  const Thread& it = threads_[current_];
  Stop(std::move(violation) + (it.file == nullptr ? std::string() : ", after " + Where(it.file, it.line)));
}

void Fail(const std::string& what) { ThisMachine().StopAfterLastWait(what); }
void Fail(const std::string& what, const char* file, int line) {
  ThisMachine().Stop(what + " at " + Where(file, line));
}

}  // namespace jax_tt::emulation
