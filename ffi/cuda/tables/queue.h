// The launches of a call, table by table; those of the same kernel on several tables become one launch.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <string_view>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/cuda/tables/kernel.h"

namespace jax_tt {

// The launches on one table, in their order.
class TableQueue {
 public:
  struct Item {
    TableKernel kernel;
    int64_t blocks;
    size_t shared_bytes;
    std::string args;  // as bytes
  };

  template <typename Args>
  void Add(const TableKernel& kernel, int64_t blocks, size_t shared_bytes, const Args& args) {
    static_assert(sizeof(Args) <= kMaxArgs);
    if (blocks == 0) return;
    items_.push_back({kernel, blocks, shared_bytes, std::string(reinterpret_cast<const char*>(&args), sizeof(Args))});
  }
  // Words that become zero.
  void Clear(void* words, int64_t count);

  const std::vector<Item>& items() const { return items_; }

  // Enqueues them one by one.
  Status Run(cudaStream_t stream) const;

  static constexpr int64_t kMaxArgs = 2048;  // bytes of the arguments of one launch

 private:
  std::vector<Item> items_;
};

// Bytes of memory that RunQueues takes for this many tables.
int64_t QueuesMemory(int64_t tables);

// Enqueues the launches of several tables, those of a table in their order.  Launches of different tables with the same
// kernel are one, as far as these orders permit.  A table's blocks do what they do when it is alone.  `memory`: of the
// device, of as many bytes as above.
Status RunQueues(cudaStream_t stream, const std::vector<TableQueue>& queues, void* memory);

}  // namespace jax_tt
