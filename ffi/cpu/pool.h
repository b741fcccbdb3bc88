// The thread pool of an operation.
#pragma once

#include <functional>

#include "ffi/cpu/parallel.h"

namespace jax_tt {

// `schedule` passes a closure to the thread pool; at most `workers` threads, including the caller, run at a time.
struct Pool {
  int workers = 1;
  std::function<void(std::function<void()>)> schedule;

  void Run(Phases& phases) const { phases.Run(workers, schedule); }
};

}  // namespace jax_tt
