// Phases, and ops on tables, under ThreadSanitizer: thousands of short runs on a pool that is slow, busy or shared by
// several callers.
#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ffi/cpu/parallel.h"
#include "ffi/cpu/tables/ops.h"
#include "ffi/cpu/workspace.h"
#include "tests/cpp/stress.h"

namespace {

using stress::Fail;
using stress::Threads;

// Plain, unsynchronised memory: each phase reads what the one before it wrote, and workers have scratch of their own.
void RunOnce(Threads& pool, int workers, int64_t items, int phases_count) {
  jax_tt::Workspace workspace;
  int64_t *now = nullptr, *before = nullptr;
  std::vector<int64_t*> scratch(static_cast<size_t>(workers));
  workspace.Request(&now, items);
  workspace.Request(&before, items);
  for (int64_t*& memory : scratch) workspace.Request(&memory, 4);
  if (!workspace.Allocate().ok()) Fail("no memory");
  for (int64_t i = 0; i < items; ++i) before[i] = i;
  jax_tt::Phases phases;
  for (int p = 0; p < phases_count; ++p) {
    int64_t *from = p % 2 ? now : before, *to = p % 2 ? before : now;
    phases.AddBlocks(items, 3, [from, to, items, &scratch](int64_t begin, int64_t end, int worker) {
      int64_t* mine = scratch[static_cast<size_t>(worker)];
      for (int64_t i = begin; i < end; ++i) {
        mine[0] = from[(i + 1) % items];
        to[i] = mine[0] + 1;
      }
    });
  }
  phases.Run(workers, [&pool](std::function<void()> closure) { pool.Schedule(std::move(closure)); });
  const int64_t* last = phases_count % 2 ? now : before;
  for (int64_t i = 0; i < items; ++i)
    if (last[i] != (i + phases_count) % items + phases_count) Fail("a phase ran before the one it follows was done");
}

// Ops on tables, of which number `wrong` has no plan, if there is such a number.  Each is planned once and runs at most
// once, after that; if they change tables, none runs where one has no plan.
void RunOps(Threads& threads, int workers, int count, int wrong, jax_tt::Changes changes) {
  const jax_tt::Pool pool{workers, [&](std::function<void()> closure) { threads.Schedule(std::move(closure)); }};
  std::vector<int> planned(static_cast<size_t>(count)), ran(planned.size()), shared(planned.size());
  std::vector<jax_tt::TableOp> ops;
  for (size_t k = 0; k < planned.size(); ++k) {
    const bool large = k == 1;
    ops.push_back({"t", large ? 1000.0 : static_cast<double>(k % 4),
                   [&, k](const jax_tt::Pool&) -> jax_tt::Status {
                     ++planned[k];
                     if (static_cast<int>(k) >= wrong) return jax_tt::InvalidArgument("of " + std::to_string(k));
                     return {};
                   },
                   [&, k](const jax_tt::Pool& own) -> jax_tt::Status {
                     if (!planned[k]) Fail("an op ran before its plan");
                     ++ran[k];
                     shared[k] = own.workers;
                     return {};
                   }});
  }
  const jax_tt::Status status = jax_tt::RunTableOps(ops, changes, pool);
  const bool fails = wrong < count;
  if (status.message != (fails ? "table 't': of " + std::to_string(wrong) : ""))
    Fail("not the error of the first table");
  for (size_t k = 0; k < planned.size(); ++k) {
    const bool runs = changes == jax_tt::Changes::kTables ? !fails : static_cast<int>(k) < wrong;
    if (planned[k] != 1 || ran[k] != runs) Fail("an op was planned or run too often or too rarely");
    const bool large = k == 1, small = k % 4 == 0;
    if (runs && (large || small) && shared[k] != (large ? workers : 1)) Fail("an op had the wrong share of the pool");
  }
}

}  // namespace

int main() {
  Threads pool(3);
  for (int round = 0; round < 300; ++round) {
    const int count = round % 9;
    const int wrong = round % 2 ? count : round % 5;
    RunOps(pool, 1 + round % 5, count, wrong, round % 3 ? jax_tt::Changes::kTables : jax_tt::Changes::kNothing);
  }
  for (int round = 0; round < 400; ++round) RunOnce(pool, 1 + round % 6, 1 + round % 37, round % 9);
  // Several callers at once, and closures that keep the pool busy: a caller must finish without any help.
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&pool, caller] {
      for (int round = 0; round < 150; ++round) RunOnce(pool, 1 + (round + caller) % 5, 1 + round % 23, 1 + round % 7);
    });
  std::atomic<bool> release{false};
  for (int i = 0; i < 3; ++i)
    pool.Schedule([&release] {
      while (!release.load()) std::this_thread::yield();
    });
  for (std::thread& caller : callers) caller.join();
  release.store(true);
  std::puts("ok");
  return 0;
}
