#include "ffi/cpu/tables/ops.h"

#include <stdint.h>

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace jax_tt {
namespace {

using Step = std::function<Status(TableOp&, const Pool&)>;

// The ops of a call, the one with most work first.
class Ordered {
 public:
  explicit Ordered(std::vector<TableOp>& ops) : ops_(ops), order_(ops.size()), found_(ops.size()) {
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return ops[a].work > ops[b].work; });
  }

  // The number of ops, from the first on, that are more than an equal part of the work that is left after those before.
  size_t Large(int workers) const {
    double left = 0;
    for (const TableOp& op : ops_) left += op.work;
    size_t count = 0;
    for (; count < order_.size() && ops_[order_[count]].work * workers > left; ++count)
      left -= ops_[order_[count]].work;
    return count;
  }

  // Takes a step of all ops, the first `large` of them with the whole pool.  Returns the error of the first table that
  // has one.
  Status Take(const Step& step, size_t large, const Pool& pool) {
    const auto take = [&](size_t place, const Pool& own) {
      const size_t k = order_[place];
      found_[k] = Named(step(ops_[k], own), ops_[k].table);
    };
    for (size_t place = 0; place < large; ++place) take(place, pool);
    const auto tasks = static_cast<int64_t>(order_.size() - large);
    Phases phases;
    phases.Add(tasks, [&](int64_t task, int) { take(large + static_cast<size_t>(task), Pool{}); });
    phases.Run(static_cast<int>(std::min<int64_t>(tasks, pool.workers)), pool.schedule);
    for (const Status& status : found_)
      if (!status.ok()) return status;
    return {};
  }

 private:
  std::vector<TableOp>& ops_;
  std::vector<size_t> order_;
  std::vector<Status> found_;
};

}  // namespace

Status RunTableOps(std::vector<TableOp> ops, Changes changes, const Pool& pool) {
  Ordered ordered(ops);
  const Step plan = [](TableOp& op, const Pool& own) { return op.plan(own); };
  const Step run = [](TableOp& op, const Pool& own) {
    Status status = op.run(own);
    op.plan = op.run = nullptr;  // the op may own its plan, whose memory the next one can use
    return status;
  };
  const Step both = [&](TableOp& op, const Pool& own) {
    Status status = plan(op, own);
    return status.ok() ? run(op, own) : status;
  };
  const size_t large = ordered.Large(pool.workers);
  if (changes == Changes::kNothing) return ordered.Take(both, large, pool);
  JAX_TT_RETURN_IF_ERROR(ordered.Take(plan, large, pool));
  return ordered.Take(run, large, pool);
}

}  // namespace jax_tt
