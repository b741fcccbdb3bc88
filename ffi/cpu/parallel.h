// Runs a sequence of parallel phases on XLA's thread pool.
//
// Each phase is a set of independent tasks; a phase starts when the previous one is complete.  The calling thread
// works too, and workers wait only for tasks that are already running in another thread, never for queued ones, so a
// busy pool cannot cause a deadlock.  Tasks write disjoint memory, so results do not depend on the number of threads.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace jax_tt {

class Phases {
 public:
  // fn(task, worker): worker is below the number of workers given to Run, and no two threads share one at a time.
  using Task = std::function<void(int64_t task, int worker)>;

  void Add(int64_t tasks, Task fn) {
    if (tasks > 0) state_->phases.push_back(std::make_unique<Phase>(tasks, std::move(fn)));
  }

  // Adds fn(begin, end, worker) over blocks of [0, count).
  template <typename Fn>
  void AddBlocks(int64_t count, int64_t block, Fn fn) {
    Add((count + block - 1) / block, [count, block, fn](int64_t task, int worker) {
      const int64_t end = (task + 1) * block;
      fn(task * block, end < count ? end : count, worker);
    });
  }

  // Runs all phases to their end.  `schedule` hands a closure to a thread pool.
  template <typename Schedule>
  void Run(int workers, Schedule&& schedule) {
    const std::shared_ptr<State> state = state_;
    int64_t tasks = 0;  // of the phase with the most; waking more threads would only cost time
    for (const std::unique_ptr<Phase>& phase : state->phases) tasks = std::max(tasks, phase->tasks);
    try {
      for (int helper = 1; helper < std::min<int64_t>(workers, tasks); ++helper)
        schedule([state, helper] { state->Work(helper); });
    } catch (...) {  // helpers are optional, and those already scheduled use the state: continue without the others
    }
    state->Work(0);
  }

 private:
  struct Phase {
    Phase(int64_t tasks, Task fn) : tasks(tasks), fn(std::move(fn)) {}
    const int64_t tasks;
    const Task fn;
    std::atomic<int64_t> next{0}, done{0};
  };

  struct State {
    std::vector<std::unique_ptr<Phase>> phases;

    void Work(int worker) {
      for (const std::unique_ptr<Phase>& phase : phases) {
        int64_t finished = 0;
        for (int64_t task; (task = phase->next.fetch_add(1, std::memory_order_relaxed)) < phase->tasks; ++finished)
          phase->fn(task, worker);
        phase->done.fetch_add(finished, std::memory_order_acq_rel);
        for (int spins = 0; phase->done.load(std::memory_order_acquire) < phase->tasks; ++spins)
          if (spins > 2000) std::this_thread::yield();
      }
    }
  };

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Threads to use out of a pool of `pool_threads`, at most JAX_TT_NUM_THREADS.
inline int NumWorkers(int64_t pool_threads) {
  static const int64_t limit = [] {
    const char* text = std::getenv("JAX_TT_NUM_THREADS");
    const long value = text ? std::strtol(text, nullptr, 10) : 0;
    return value > 0 ? static_cast<int64_t>(value) : int64_t{1} << 20;
  }();
  const int64_t workers = pool_threads < limit ? pool_threads : limit;
  return static_cast<int>(workers < 1 ? 1 : workers);
}

}  // namespace jax_tt
