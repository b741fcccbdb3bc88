#include <string.h>

#include <algorithm>
#include <map>

#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/tables/queue.h"
#include "ffi/cuda/upload.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1056;  // eight for each multiprocessor of an H200

struct ClearArgs {
  int32_t* words;
  int64_t count;
};

__global__ void __launch_bounds__(kThreads) ClearWords(const __grid_constant__ ManyTables<ClearArgs> tables) {
  BlockOfTable block;
  const ClearArgs& args = tables.Find(&block);
  for (int64_t i = block.index * kThreads + threadIdx.x; i < args.count; i += block.count * kThreads) args.words[i] = 0;
}

// Of one table, it is no launch at all.
const char* ClearOne(cudaStream_t stream, int64_t, size_t, const void* args) {
  const ClearArgs& clear = *static_cast<const ClearArgs*>(args);
  return LaunchWord(
      ToStatus(cudaMemsetAsync(clear.words, 0, static_cast<size_t>(clear.count) * sizeof(int32_t), stream)));
}
const char* ClearMany(cudaStream_t stream, int64_t blocks, size_t, const TablesOnDevice& tables) {
  const ManyTables<ClearArgs> many{static_cast<const ClearArgs*>(tables.args), tables.blocks, tables.count};
  return LaunchWord(Launch(stream, blocks, kThreads, 0, ClearWords, many));
}

using Item = TableQueue::Item;
using KernelId = decltype(TableKernel::many);

// The items of one launch.
using Group = std::vector<const Item*>;

// Divides the items of all tables into groups.
class Grouping {
 public:
  explicit Grouping(const std::vector<TableQueue>& queues) : queues_(queues), next_(queues.size()) {
    for (const TableQueue& queue : queues) {
      std::map<KernelId, int> items;
      for (const Item& item : queue.items()) ++items[item.kernel.many];
      for (const auto& [kernel, count] : items) ++waiting_[kernel];
      left_.push_back(std::move(items));
    }
  }

  // The next group; empty after the last.
  Group Next() {
    std::map<KernelId, int> heads;
    for (size_t k = 0; k < queues_.size(); ++k)
      if (const Item* head = Head(k)) ++heads[head->kernel.many];
    // A kernel that no table has behind another one loses nothing by being next; else the one with most tables.
    KernelId best = nullptr;
    int most = 0;
    for (size_t k = 0; k < queues_.size(); ++k) {
      const Item* head = Head(k);
      if (head == nullptr) continue;
      const KernelId kernel = head->kernel.many;
      const int count = heads[kernel];
      const int worth = count == waiting_[kernel] ? count + static_cast<int>(queues_.size()) : count;
      if (worth > most) {
        most = worth;
        best = kernel;
      }
    }
    Group group;
    int64_t blocks = 0;
    for (size_t k = 0; k < queues_.size() && best != nullptr; ++k) {
      const Item* head = Head(k);
      if (head == nullptr || head->kernel.many != best) continue;
      if (!group.empty() && blocks + head->blocks > INT32_MAX) break;
      blocks += head->blocks;
      group.push_back(head);
      ++next_[k];
      if (--left_[k][best] == 0) --waiting_[best];
    }
    return group;
  }

 private:
  const Item* Head(size_t k) const {
    const std::vector<Item>& items = queues_[k].items();
    return next_[k] < items.size() ? &items[next_[k]] : nullptr;
  }

  const std::vector<TableQueue>& queues_;
  std::vector<size_t> next_;
  std::vector<std::map<KernelId, int>> left_;  // items of each table by kernel
  std::map<KernelId, int> waiting_;            // tables that have any left
};

// Launches whose arguments and lists are in the memory of the device at the same time.
class Batch {
 public:
  Batch(cudaStream_t stream, void* memory, int64_t bytes)
      : stream_(stream), memory_(static_cast<char*>(memory)), bytes_(static_cast<size_t>(bytes)) {}

  Status Add(const Group& group) {
    Launching launching{group[0]->kernel, group[0], 0, 0, {}};
    std::string args;
    std::vector<TableBlocks> list;
    for (const Item* item : group) {
      list.push_back({static_cast<int32_t>(list.size()), static_cast<int32_t>(launching.blocks)});
      launching.blocks += item->blocks;
      launching.shared_bytes = std::max(launching.shared_bytes, item->shared_bytes);
      args += item->args;
    }
    if (group.size() > 1) {
      const std::string blocks(reinterpret_cast<const char*>(list.data()), list.size() * sizeof(TableBlocks));
      if (image_.size() + args.size() + blocks.size() > bytes_) JAX_TT_RETURN_IF_ERROR(Run());
      if (args.size() + blocks.size() > bytes_) return Internal("a launch needs more memory than was reserved for it");
      launching.tables = {Place(args), reinterpret_cast<const TableBlocks*>(Place(blocks)),
                          static_cast<int>(list.size())};
    }
    launchings_.push_back(std::move(launching));
    return {};
  }

  // Writes what the launches need, and enqueues them.
  Status Run() {
    JAX_TT_RETURN_IF_ERROR(Upload(stream_, reinterpret_cast<const uint32_t*>(image_.data()),
                                  static_cast<int64_t>(image_.size() / sizeof(uint32_t)),
                                  reinterpret_cast<uint32_t*>(memory_)));
    for (const Launching& own : launchings_)
      JAX_TT_RETURN_IF_ERROR(LaunchStatus(
          own.tables.count == 0 ? own.kernel.one(stream_, own.blocks, own.shared_bytes, own.first->args.data())
                                : own.kernel.many(stream_, own.blocks, own.shared_bytes, own.tables)));
    launchings_.clear();
    image_.clear();
    places_.clear();
    return {};
  }

 private:
  struct Launching {
    TableKernel kernel;
    const Item* first;
    int64_t blocks;
    size_t shared_bytes;
    TablesOnDevice tables;  // without any where there is one
  };

  // Where these bytes will be on the device.  Successive kernels often have the same arguments.
  const char* Place(const std::string& bytes) {
    const auto [found, is_new] = places_.emplace(bytes, image_.size());
    if (is_new) image_ += bytes;
    return memory_ + found->second;
  }

  cudaStream_t stream_;
  char* memory_;
  size_t bytes_;
  std::vector<Launching> launchings_;
  std::string image_;
  std::map<std::string, size_t> places_;
};

}  // namespace

void TableQueue::Clear(void* words, int64_t count) {
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMaxBlocks);
  Add({ClearOne, ClearMany}, blocks, 0, ClearArgs{static_cast<int32_t*>(words), count});
}

Status TableQueue::Run(cudaStream_t stream) const {
  Batch batch(stream, nullptr, 0);
  for (const Item& item : items_) JAX_TT_RETURN_IF_ERROR(batch.Add({&item}));
  return batch.Run();
}

int64_t QueuesMemory(int64_t tables) {
  // Of any two launches at least; most calls need no more.
  constexpr int64_t kEach = 2 * (TableQueue::kMaxArgs + static_cast<int64_t>(sizeof(TableBlocks)));
  return tables == 1 ? 0 : tables * kEach;
}

Status RunQueues(cudaStream_t stream, const std::vector<TableQueue>& queues, void* memory) {
  Batch batch(stream, memory, QueuesMemory(static_cast<int64_t>(queues.size())));
  Grouping grouping(queues);
  bool any = false;
  for (Group group = grouping.Next(); !group.empty(); group = grouping.Next()) {
    JAX_TT_RETURN_IF_ERROR(batch.Add(group));
    any = true;
  }
  if (!any) return Launch(stream, 0, 1, 0, ClearWords, ManyTables<ClearArgs>{});
  return batch.Run();
}

}  // namespace jax_tt
