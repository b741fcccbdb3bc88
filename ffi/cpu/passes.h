// Passes over several tables in one operation: their tasks run side by side in the same phases.
#pragma once

#include <stdint.h>

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/cpu/pool.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {

// Independent tasks of one table.
struct TaskSet {
  int64_t tasks = 0;
  Phases::Task run;
};

// fn(begin, end, worker) over blocks of [0, count).
template <typename Fn>
TaskSet BlockTasks(int64_t count, int64_t block, Fn fn) {
  return {(count + block - 1) / block, [count, block, fn](int64_t task, int worker) {
            const int64_t end = (task + 1) * block;
            fn(task * block, end < count ? end : count, worker);
          }};
}

// A forward pass, backward pass or update of one table.
class Pass {
 public:
  Pass() = default;
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;
  virtual ~Pass() = default;

  // The name of the table, for errors.
  virtual std::string_view table() const = 0;
  // Requests working memory, which is allocated before Plan.
  virtual void Request(int workers, Workspace& workspace) = 0;
  // Checks and sorts the batch.  If this fails for one table, no rounds of any table run.
  virtual Status Plan() = 0;
  // What runs after Plan.  It is called before, so that sizes must not depend on the plan.
  virtual std::vector<TaskSet> Rounds() = 0;
  // Called after all rounds; may refuse what they found.
  virtual Status Finish() { return {}; }
};

// Runs passes to their end; the k-th rounds of all tables are one phase.  Tables that need much memory take turns.
Status RunPasses(const std::vector<std::unique_ptr<Pass>>& passes, const Pool& pool);

}  // namespace jax_tt
