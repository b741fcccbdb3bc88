#include "ffi/cpu/passes.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace jax_tt {
namespace {

// Working memory of tables that run together.  Larger blocks would not be kept for the next call.
constexpr int64_t kTogetherBytes = int64_t{32} << 20;

// Adds one phase with the tasks of these rounds.  The tables take turns, so that the parts of an output that lie side
// by side are written one after another.
void AddRounds(std::vector<TaskSet> rounds, const std::atomic<bool>& failed, Phases& phases) {
  int64_t most = 0, total = 0;
  for (const TaskSet& round : rounds) {
    most = std::max(most, round.tasks);
    total += round.tasks;
  }
  struct Turn {
    const TaskSet* round;
    int64_t task;
  };
  auto turns = std::make_shared<std::vector<Turn>>();
  auto kept = std::make_shared<std::vector<TaskSet>>(std::move(rounds));
  turns->reserve(static_cast<size_t>(total));
  for (int64_t task = 0; task < most; ++task)
    for (const TaskSet& round : *kept)
      if (task < round.tasks) turns->push_back({&round, task});
  phases.Add(total, [kept, turns, &failed](int64_t task, int worker) {
    if (failed.load(std::memory_order_relaxed)) return;
    const Turn& turn = (*turns)[static_cast<size_t>(task)];
    turn.round->run(turn.task, worker);
  });
}

using Passes = std::vector<std::unique_ptr<Pass>>;

// Runs the passes [begin, end), whose memory is in `workspace`.
Status RunSome(const Passes& passes, size_t begin, size_t end, Workspace& workspace, const Pool& pool) {
  const size_t count = end - begin;
  if (Status status = workspace.Allocate(); !status.ok()) return status;
  std::vector<std::vector<TaskSet>> rounds;
  size_t most = 0;
  for (size_t k = begin; k < end; ++k) {
    rounds.push_back(passes[k]->Rounds());
    most = std::max(most, rounds.back().size());
  }
  std::atomic<bool> failed{false};
  std::vector<Status> planned(count);
  Phases phases;
  const auto plan = [&](int64_t task, int) {
    const auto table = static_cast<size_t>(task);
    planned[table] = passes[begin + table]->Plan();
    if (!planned[table].ok()) failed.store(true, std::memory_order_relaxed);
  };
  // A helper would only wait for a single plan.
  if (count == 1)
    plan(0, 0);
  else
    phases.Add(static_cast<int64_t>(count), plan);
  for (size_t k = 0; k < most; ++k) {
    std::vector<TaskSet> phase;
    for (std::vector<TaskSet>& own : rounds)
      if (k < own.size()) phase.push_back(std::move(own[k]));
    AddRounds(std::move(phase), failed, phases);
  }
  if (count != 1 || !failed.load()) pool.Run(phases);
  for (size_t k = 0; k < count; ++k)
    if (!planned[k].ok()) return Named(planned[k], passes[begin + k]->table());
  Status first;
  for (size_t k = begin; k < end; ++k)
    if (Status status = Named(passes[k]->Finish(), passes[k]->table()); first.ok()) first = std::move(status);
  return first;
}

}  // namespace

Status RunPasses(const Passes& passes, const Pool& pool) {
  for (size_t begin = 0; begin < passes.size();) {
    Workspace workspace;
    size_t end = begin;
    do passes[end++]->Request(pool.workers, workspace);
    while (end < passes.size() && workspace.size() < kTogetherBytes);
    if (Status status = RunSome(passes, begin, end, workspace, pool); !status.ok()) return status;
    begin = end;
  }
  return {};
}

}  // namespace jax_tt
