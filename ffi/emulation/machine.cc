#include "ffi/emulation/machine.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

constinit thread_local jax_tt::emulation::Index threadIdx{};
constinit thread_local jax_tt::emulation::Index blockIdx{};
constinit thread_local jax_tt::emulation::Index blockDim{};
constinit thread_local jax_tt::emulation::Index gridDim{};

namespace jax_tt::emulation {

constinit thread_local Now now{};

namespace {

// A permutation of the blocks that takes no memory: multiples of a number that shares no factor with their count.
struct BlockOrder {
  BlockOrder(int64_t blocks, uint64_t seed) : count(static_cast<uint64_t>(blocks)) {
    if (seed == 0) return;
    Random random(seed);
    first = random.Next() % count;
    do step = random.Next() % count + 1;
    while (std::gcd(step, count) != 1);
  }
  unsigned operator()(uint64_t i) const { return static_cast<unsigned>((first + i * step) % count); }

  uint64_t count, first = 0, step = 1;
};

// Machines that no launch uses. There are as many as ever ran at once, however many threads launch kernels: a machine
// has up to 1,024 stacks, each of which takes two of the 65,530 mappings that a process may have.
class MachinePool {
 public:
  std::unique_ptr<Machine> Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Machine>();
    std::unique_ptr<Machine> last = std::move(idle_.back());
    idle_.pop_back();
    return last;
  }
  void Return(std::unique_ptr<Machine> machine) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(machine));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Machine>> idle_;
};

constinit thread_local Machine* machine JAX_TT_FAST_TLS = nullptr;

}  // namespace

Machine& ThisMachine() { return *machine; }

std::string Machine::Run(const Grid& grid) {
  if (thread_ != std::this_thread::get_id()) {
    AbandonFibers();  // they may hold addresses of the other thread's variables
    thread_ = std::this_thread::get_id();
  }
  grid_ = grid;
  violation_.clear();
  now.barrier = barriers_;
  blockDim.x = static_cast<unsigned>(grid.threads);
  gridDim.x = static_cast<unsigned>(grid.blocks);
  if (now.barrier > 0x80000000u) {
    shared_.ForgetHistory();
    now.barrier = 0;
  }
  const BlockOrder order(grid.blocks, grid.seed);
  for (int64_t i = 0; i < grid.blocks; ++i) {
    const unsigned block = order(static_cast<uint64_t>(i));
    StartBlock(block, grid.seed == 0 ? 0 : Random(grid.seed ^ (uint64_t{block} << 20)).Next() | 1);
    SetCurrent(ready_.Take());
    EnterCurrent(launcher_);
    if (!violation_.empty()) {
      AbandonFibers();
      break;
    }
  }
  barriers_ = now.barrier;
  return std::exchange(violation_, {});
}

void Machine::StartBlock(unsigned block, uint64_t seed) {
  blockIdx.x = block;
  now.start = ++now.barrier;
  ended_ = at_barrier_ = predicates_ = 0;
  shared_.StartBlock(static_cast<int64_t>(grid_.shared_bytes));
  for (int first = 0; first < grid_.threads; first += kWarp) {
    const int lanes = std::min(kWarp, grid_.threads - first);
    Warp& warp = warps_[first / kWarp];
    warp.present = lanes == kWarp ? ~uint32_t{0} : (uint32_t{1} << lanes) - 1;
    warp.ended = 0;
    warp.gatherings = 0;
    warp.order.Reset();
  }
  uint16_t all[kMaxThreads];
  for (int i = 0; i < grid_.threads; ++i) {
    threads_[i].fiber = nullptr;
    threads_[i].state = State::kReady;
    threads_[i].file = nullptr;
    all[i] = static_cast<uint16_t>(i);
  }
  ready_.Reset(seed);
  ready_.Add(all, grid_.threads);
}

// After a violation: most fibers are somewhere inside the kernel, and none goes on from there.
void Machine::AbandonFibers() {
  idle_.clear();
  for (const std::unique_ptr<Fiber>& fiber : fibers_) {
    fiber->Reset();
    idle_.push_back(fiber.get());
  }
}

void Machine::SetCurrent(int thread) {
  current_ = thread;
  threadIdx.x = static_cast<unsigned>(thread);
  const WarpOrder& order = warps_[thread / kWarp].order;
  now.warp = static_cast<uint32_t>(thread / kWarp);
  now.lane_bit = uint32_t{1} << thread % kWarp;
  now.full = order.full();
  now.clock = order.clock(thread % kWarp);
}

Fiber* Machine::IdleFiber() {
  if (idle_.empty()) {
    fibers_.push_back(std::make_unique<Fiber>(&Machine::RunThreads, static_cast<int>(fibers_.size())));
    return fibers_.back().get();
  }
  Fiber* const fiber = idle_.back();
  idle_.pop_back();
  return fiber;
}

// Gives the processor to the current thread; returns when `from` has its turn again.
void Machine::EnterCurrent(Context& from) {
  Thread& thread = threads_[current_];
  if (thread.fiber == nullptr) thread.fiber = IdleFiber();
  running_ = thread.fiber;
  Switch(from, *thread.fiber);
}

// The body of every fiber.
void Machine::RunThreads() {
  Machine& machine = ThisMachine();
  try {
    machine.RunThreadsHere();
  } catch (const Stopped&) {
  }
  Switch(*machine.running_, machine.launcher_);
}

// A fiber that has ended its thread goes on with the next, so that threads which never wait cost no switch.
void Machine::RunThreadsHere() {
  for (;;) {
    grid_.call(grid_.kernel);
    CheckEnd();
    Fiber* const self = running_;
    if (ready_.empty()) {
      if (ended_ < grid_.threads) StopStalled();
      idle_.push_back(self);
      Switch(*self, launcher_);
      continue;
    }
    SetCurrent(ready_.Take());
    Thread& next = threads_[current_];
    if (next.fiber == nullptr) {
      next.fiber = self;
    } else {
      idle_.push_back(self);
      EnterCurrent(*self);
    }
  }
}

// The running thread waits: another has its turn, until this one is ready and chosen.
void Machine::Wait() {
  if (ready_.empty()) StopStalled();
  const int self = current_;
  const int next = ready_.Take();
  SetCurrent(next);
  if (next != self) EnterCurrent(*threads_[self].fiber);
}

void Machine::Stop(std::string violation) {
  violation_ =
      std::move(violation) + " (block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x) + ")";
  throw Stopped{};
}

std::string RunGrid(const Grid& grid) {
  static MachinePool& pool = *new MachinePool;  // threads may outlive what is destroyed at exit
  std::unique_ptr<Machine> taken = pool.Take();
  machine = taken.get();
  std::string violation = taken->Run(grid);
  pool.Return(std::move(taken));
  return violation;
}

const WarpOrder& CurrentWarpOrder() { return ThisMachine().order(); }

Region* TakeShared(int number, int64_t offset, int64_t count, size_t element_size) {
  return ThisMachine().shared().Take(number, offset, count, element_size);
}

}  // namespace jax_tt::emulation
