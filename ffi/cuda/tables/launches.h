// Launches that each work on several tables of a call.
#pragma once

#include <stdint.h>
#include <string.h>

#include <functional>
#include <utility>
#include <vector>

#include "ffi/core/bag_vectors.h"
#include "ffi/cuda/tables/list.h"
#include "ffi/cuda/upload.h"

namespace jax_tt {

// What one launch works on.
template <typename Table>
struct TableLaunch {
  TableList<Table> tables;
  int64_t blocks = 0;

  // Calls enqueue(tables) with OneTable or ManyTables, for kernels that are compiled for both.
  template <typename Enqueue>
  Status Visit(Enqueue enqueue) const {
    return tables.many.tables == nullptr ? enqueue(tables.one) : enqueue(tables.many);
  }
};

// Collects the launches of a call; then writes its tables, their columns and the lists of all launches to the device,
// and enqueues the launches in their order.  Table::vectors are BagVectors, and Table::kLaunches is the number of
// launches that may work on one table.
template <typename Table>
class TableLaunches {
 public:
  // Bytes of memory for a call on this many tables, with this many columns.
  static int64_t Bytes(int64_t tables, int64_t columns) {
    if (tables == 1 && columns == 0) return 0;
    const int64_t lists = tables * Table::kLaunches * static_cast<int64_t>(sizeof(TableBlocks));
    return tables * static_cast<int64_t>(sizeof(Table)) + columns * static_cast<int64_t>(sizeof(int64_t)) + lists;
  }

  // `memory`: of the device, of that many bytes, aligned to 8.  The columns of the tables are memory of the host.
  TableLaunches(std::vector<Table> tables, void* memory)
      : tables_(std::move(tables)),
        one_(tables_.size() == 1 && tables_[0].vectors.columns == nullptr),
        memory_(static_cast<char*>(memory)) {
    if (one_) return;
    const auto table_bytes = tables_.size() * sizeof(Table);
    image_.resize(table_bytes);
    for (Table& table : tables_) {
      BagVectors& vectors = table.vectors;
      if (vectors.columns == nullptr) continue;
      const int64_t features = vectors.features(table.batch.total_bags());
      vectors.columns = Append(vectors.columns, features);
      columns_ += features;
    }
    memcpy(image_.data(), tables_.data(), table_bytes);
  }

  const std::vector<Table>& tables() const { return tables_; }

  // enqueue(stream, launch) enqueues a launch on all tables that takes(table) chooses, with blocks(table) blocks each;
  // none where it chooses no table.
  template <typename Takes, typename Blocks, typename Enqueue>
  void Add(Takes takes, Blocks blocks, Enqueue enqueue) {
    TableLaunch<Table> launch;
    std::vector<TableBlocks> list;
    for (size_t k = 0; k < tables_.size(); ++k) {
      if (!takes(tables_[k])) continue;
      list.push_back({static_cast<int32_t>(k), static_cast<int32_t>(launch.blocks)});
      launch.blocks += blocks(tables_[k]);
    }
    if (list.empty()) return;
    if (one_) {
      launch.tables.one.table = tables_[0];
    } else {
      const auto count = static_cast<int>(list.size());
      launch.tables.many = {reinterpret_cast<const Table*>(memory_), Append(list.data(), count), count};
    }
    steps_.push_back([launch, enqueue](cudaStream_t stream) { return enqueue(stream, launch); });
  }
  // The same of work that is not on single tables.
  void Add(std::function<Status(cudaStream_t)> enqueue) { steps_.push_back(std::move(enqueue)); }

  Status Run(cudaStream_t stream) const {
    if (static_cast<int64_t>(image_.size()) > Bytes(static_cast<int64_t>(tables_.size()), columns_))
      return Internal("the tables of a call need more memory than was reserved for them");
    JAX_TT_RETURN_IF_ERROR(Upload(stream, reinterpret_cast<const uint32_t*>(image_.data()),
                                  static_cast<int64_t>(image_.size() / sizeof(uint32_t)),
                                  reinterpret_cast<uint32_t*>(memory_)));
    for (const auto& step : steps_) JAX_TT_RETURN_IF_ERROR(step(stream));
    return {};
  }

 private:
  // Adds words to the image; returns where they will be on the device.
  template <typename T>
  const T* Append(const T* values, int64_t count) {
    static_assert(sizeof(T) == 8 && sizeof(Table) % 8 == 0, "everything in the image is aligned to 8 bytes");
    const size_t place = image_.size(), bytes = static_cast<size_t>(count) * sizeof(T);
    image_.resize(place + bytes);
    if (bytes != 0) memcpy(image_.data() + place, values, bytes);
    return reinterpret_cast<const T*>(memory_ + place);
  }

  std::vector<Table> tables_;
  int64_t columns_ = 0;
  bool one_;
  char* memory_;
  std::vector<char> image_;
  std::vector<std::function<Status(cudaStream_t)>> steps_;
};

}  // namespace jax_tt
