// Temporary memory of one operation, in a single block whose size is known before any work starts.
#pragma once

#include <stdint.h>

#include <vector>

#include "ffi/common/status.h"

namespace jax_tt {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();

  // Requests `count` elements; *where is set by Allocate.
  template <typename T>
  void Request(T** where, int64_t count) {
    requests_.push_back({reinterpret_cast<void**>(where), size_});
    size_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  }

  Status Allocate();
  int64_t size() const { return size_; }

 private:
  static constexpr int64_t kAlignment = 64;
  struct Pending {
    void** where;
    int64_t offset;
  };
  std::vector<Pending> requests_;
  int64_t size_ = 0;
  void* block_ = nullptr;
  int64_t block_size_ = 0;
};

}  // namespace jax_tt
