#include "ffi/cuda/tables/works.h"

#include <algorithm>
#include <cstddef>

namespace jax_tt {
namespace {

// Tables that would need more together take turns in the same memory.
constexpr int64_t kMostBytes = int64_t{256} << 20;

// Tables [begin, end) of a call.
struct Turn {
  size_t begin, end;
  int64_t bytes;  // of their works

  int64_t memory() const { return bytes + QueuesMemory(static_cast<int64_t>(end - begin)); }
};

std::vector<Turn> Turns(const std::vector<int64_t>& bytes) {
  std::vector<Turn> turns;
  for (size_t k = 0; k < bytes.size(); ++k) {
    if (turns.empty() || turns.back().bytes + bytes[k] > kMostBytes) turns.push_back({k, k, 0});
    turns.back().end = k + 1;
    turns.back().bytes += bytes[k];
  }
  return turns;
}

std::vector<int64_t> BytesOf(const std::vector<TableWork>& works) {
  std::vector<int64_t> bytes;
  for (const TableWork& work : works) bytes.push_back(work.bytes);
  return bytes;
}

}  // namespace

int64_t WorksMemory(const std::vector<int64_t>& bytes) {
  int64_t most = 0;
  for (const Turn& turn : Turns(bytes)) most = std::max(most, turn.memory());
  return most;
}

int64_t WorksMemory(const std::vector<TableWork>& works) { return WorksMemory(BytesOf(works)); }

Status RunWorks(cudaStream_t stream, const std::vector<TableWork>& works, void* memory) {
  for (const Turn& turn : Turns(BytesOf(works))) {
    std::vector<TableQueue> queues(turn.end - turn.begin);
    char* own = static_cast<char*>(memory);
    for (size_t k = turn.begin; k < turn.end; ++k) {
      JAX_TT_RETURN_IF_ERROR(works[k].enqueue(queues[k - turn.begin], own));
      own += works[k].bytes;
    }
    JAX_TT_RETURN_IF_ERROR(RunQueues(stream, queues, own));
  }
  return {};
}

}  // namespace jax_tt
