#include <cstdlib>
#include <new>
#include <string>

#include "ffi/emulation/machine.h"

namespace jax_tt::emulation {

void SharedMemory::Free::operator()(void* p) const { free(p); }

// At worst every byte is an element.
SharedMemory::SharedMemory()
    : data_(static_cast<char*>(aligned_alloc(128, kMaxShared))),
      cells_(static_cast<Cell*>(calloc(kMaxShared, sizeof(Cell)))) {
  if (!data_ || !cells_) throw std::bad_alloc();
}

void SharedMemory::StartBlock(int64_t bytes) {
  bytes_ = bytes;
  cells_used_ = 0;
  taken_ = 0;
}

void SharedMemory::ForgetHistory() {
  for (int64_t i = 0; i < kMaxShared; ++i) cells_.get()[i] = {};
}

Region* SharedMemory::Take(int number, int64_t offset, int64_t count, size_t element_size) {
  if (number < taken_) {
    Region& region = regions_[number];
    if (region.offset == offset && region.count == count && region.element_size == element_size) return &region;
    Fail("threads of the block take different shared memory: array " + std::to_string(number) + " has " +
         std::to_string(region.count) + " elements of " + std::to_string(region.element_size) +
         " bytes, this thread takes " + std::to_string(count) + " of " + std::to_string(element_size));
  }
  const int64_t bytes = count * static_cast<int64_t>(element_size);
  if (count < 0 || offset + bytes > bytes_)
    Fail("shared memory overrun: array " + std::to_string(taken_) + " ends at byte " + std::to_string(offset + bytes) +
         ", the launch gave " + std::to_string(bytes_));
  if (taken_ == kMaxTakes) Fail("more than " + std::to_string(kMaxTakes) + " shared arrays");
  Region& region = regions_[taken_];
  region = {data_.get() + offset,          cells_.get() + cells_used_,          count,
            static_cast<uint32_t>(offset), static_cast<uint32_t>(element_size), taken_};
  ++taken_;
  cells_used_ += count;
  return &region;
}

}  // namespace jax_tt::emulation
