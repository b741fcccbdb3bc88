// Ops on several tables in one operation: each is one task, except for those that are a large part of the work.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/cpu/pool.h"

namespace jax_tt {

// An op on one table.  Its results do not depend on the pool.
struct TableOp {
  std::string_view table;  // for errors
  double work = 0;         // about proportional to its time
  std::function<Status(const Pool&)> plan, run;
};

// Whether an op changes its table, and must not where that of another table is refused.
enum class Changes { kNothing, kTables };

// Plans and runs all ops.  With Changes::kTables, all plans are made before the first op runs.
//
// Within a task there is nothing to wait for, and a table stays in the cache of its processor.  At most as many tables
// as the pool has workers need working memory at a time, except for plans that ops own with Changes::kTables.  An op
// with more than its share of the work has the whole pool instead, while no other op runs.
Status RunTableOps(std::vector<TableOp> ops, Changes changes, const Pool& pool);

}  // namespace jax_tt
