#include "ffi/cpu/passes.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace jax_tt {
namespace {

// Adds one phase with the tasks of these rounds, one after another.
void AddRounds(std::vector<TaskSet> rounds, const std::atomic<bool>& failed, Phases& phases) {
  std::vector<int64_t> ends;
  int64_t total = 0;
  for (const TaskSet& round : rounds) ends.push_back(total += round.tasks);
  phases.Add(total, [rounds = std::move(rounds), ends = std::move(ends), &failed](int64_t task, int worker) {
    if (failed.load(std::memory_order_relaxed)) return;
    const auto table = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
    rounds[table].run(task - (table == 0 ? 0 : ends[table - 1]), worker);
  });
}

}  // namespace

Status RunPasses(const std::vector<std::unique_ptr<Pass>>& passes, const Pool& pool) {
  std::vector<std::vector<TaskSet>> rounds;
  size_t most = 0;
  for (const std::unique_ptr<Pass>& pass : passes) {
    if (Status status = pass->Allocate(pool.workers); !status.ok()) return status;
    rounds.push_back(pass->Rounds());
    most = std::max(most, rounds.back().size());
  }
  std::atomic<bool> failed{false};
  std::vector<Status> planned(passes.size());
  Phases phases;
  const auto plan = [&](int64_t task, int) {
    const auto table = static_cast<size_t>(task);
    planned[table] = passes[table]->Plan();
    if (!planned[table].ok()) failed.store(true, std::memory_order_relaxed);
  };
  // A helper would only wait for a single plan.
  if (passes.size() == 1)
    plan(0, 0);
  else
    phases.Add(static_cast<int64_t>(passes.size()), plan);
  for (size_t k = 0; k < most; ++k) {
    std::vector<TaskSet> phase;
    for (std::vector<TaskSet>& own : rounds)
      if (k < own.size()) phase.push_back(std::move(own[k]));
    AddRounds(std::move(phase), failed, phases);
  }
  if (passes.size() != 1 || !failed.load()) pool.Run(phases);
  for (const Status& status : planned)
    if (!status.ok()) return status;
  for (const std::unique_ptr<Pass>& pass : passes) pass->Finish();
  return {};
}

}  // namespace jax_tt
