// Hands out the memory that a handler is given.
#pragma once

#include <stdint.h>

namespace jax_tt {

// From its start on, in pieces aligned to 256 bytes; from no memory at all, to learn how much it takes.
class Workspace {
 public:
  explicit Workspace(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T = float>
  T* Take(int64_t count) {
    char* place = memory_ + bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return reinterpret_cast<T*>(place);
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace jax_tt
