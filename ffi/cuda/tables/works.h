// What a call does for each of its tables, and the workspace that the tables share.
#pragma once

#include <stdint.h>

#include <functional>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/cuda/tables/queue.h"

namespace jax_tt {

// Adds the launches on one table, which work in `bytes` bytes of memory.
struct TableWork {
  int64_t bytes = 0;
  std::function<Status(TableQueue& queue, void* memory)> enqueue;
};

// Bytes of memory for tables that work in as many bytes each.
int64_t WorksMemory(const std::vector<int64_t>& bytes);
int64_t WorksMemory(const std::vector<TableWork>& works);

// Enqueues the launches of all tables, in common where the tables fit in the memory together.
Status RunWorks(cudaStream_t stream, const std::vector<TableWork>& works, void* memory);

}  // namespace jax_tt
