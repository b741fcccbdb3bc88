// The emulated multiprocessor: one block at a time, its threads as fibers of one OS thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/emulation/fiber.h"
#include "ffi/emulation/order.h"
#include "ffi/emulation/ready_queue.h"
#include "ffi/emulation/scheduler.h"
#include "ffi/emulation/shadow.h"

namespace jax_tt::emulation {

inline constexpr int64_t kMaxShared = 227 * 1024;
inline constexpr int kMaxTakes = 64;

enum class State : uint8_t { kReady, kAtBarrier, kAtCollective, kEnded };

struct Thread {
  Fiber* fiber;  // null before its first turn
  State state;
  // Where it waits, or waited last, and what it brought.
  const char* file;
  int line;
  int width;
  uint32_t mask;
  uint32_t argument;
  uint64_t value;
  uint64_t result;
};

// Lanes that wait for the rest of their mask at one kind of collective.
struct Gathering {
  CollectiveKind kind;
  uint32_t mask, arrived;
};

struct Warp {
  uint32_t present, ended;
  int gatherings;
  Gathering gathering[kWarp];
  WarpOrder order;
};

// The shared memory of the block with the history of its elements.
class SharedMemory {
 public:
  SharedMemory();
  void StartBlock(int64_t bytes);
  void ForgetHistory();
  Region* Take(int number, int64_t offset, int64_t count, size_t element_size);

 private:
  struct Free {
    void operator()(void* p) const;
  };
  std::unique_ptr<char, Free> data_;
  std::unique_ptr<Cell, Free> cells_;  // zeroed by the system page by page, as they are first used
  int64_t bytes_ = 0;
  int64_t cells_used_ = 0;
  int taken_ = 0;
  Region regions_[kMaxTakes];
};

// Kept from launch to launch: stacks and histories are costly to make and need no clearing, since every mark in a
// history carries the count of barriers at which it was made.
class Machine {
 public:
  // machine.cc: blocks and turns.
  std::string Run(const Grid& grid);
  [[noreturn]] void Stop(std::string violation);
  [[noreturn]] void StopAfterLastWait(std::string violation);  // names the barrier or collective last passed
  const WarpOrder& order() const { return warps_[current_ / kWarp].order; }
  SharedMemory& shared() { return shared_; }

  // synchronise.cc: what threads wait for; diagnosis.cc: what is wrong when they wait in vain.
  int Barrier(BarrierKind kind, int predicate, const char* file, int line);
  uint64_t Collective(CollectiveKind kind, uint32_t mask, uint64_t value, uint32_t argument, int width,
                      const char* file, int line);

 private:
  static void RunThreads();
  void RunThreadsHere();
  void StartBlock(unsigned block, uint64_t seed);
  void AbandonFibers();
  void SetCurrent(int thread);
  void EnterCurrent(Context& from);
  void Wait();
  Fiber* IdleFiber();

  void CheckEnd();
  [[noreturn]] void StopStalled();
  std::string Waiting(int thread) const;
  void Complete(int warp, CollectiveKind kind, uint32_t mask);
  uint64_t LaneResult(int first, int lane, CollectiveKind kind, uint32_t mask);

  std::thread::id thread_;  // that it ran on last
  uint32_t barriers_ = 0;   // that it has passed
  Grid grid_{};
  int current_ = 0;
  int ended_ = 0;
  int at_barrier_ = 0;
  int first_at_barrier_ = 0;
  int predicates_ = 0;  // of the threads at the barrier, how many hold
  BarrierKind barrier_kind_{};
  Thread threads_[kMaxThreads];
  Warp warps_[kMaxThreads / kWarp];
  ReadyQueue ready_;
  SharedMemory shared_;
  Context launcher_;
  Fiber* running_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::string violation_;
};

// Thrown through a kernel that has violated a rule, up to the start of its fiber.
struct Stopped {};

Machine& ThisMachine();

// For messages.
std::string Where(const char* file, int line);  // "folder/file:12" of a source path
std::string Hex(uint32_t mask);
const char* Name(CollectiveKind kind);

}  // namespace jax_tt::emulation
