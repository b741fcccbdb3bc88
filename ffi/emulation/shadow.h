// The history of every element of shared memory: enough to tell a race or a read of nothing written from correct use.
#pragma once

#include <cstdint>

#include "ffi/emulation/current.h"

namespace jax_tt::emulation {

// Accesses that nothing has ordered among themselves, or a single one.
struct Accesses {
  static constexpr uint8_t kManyWarps = 255;

  uint32_t barrier;  // Now::barrier; an access before the last barrier of the block conflicts with nothing
  uint32_t full;     // Now::full of `warp`
  uint32_t lanes;    // who, in `warp`
  uint16_t clock;    // Now::clock, the least of them
  uint8_t warp;      // or kManyWarps
  bool atomic;
};

struct Cell {
  Accesses write, read;  // reads since the last write
};

// One Take of the block.
struct Region {
  char* data;
  Cell* cells;
  int64_t count;    // elements
  uint32_t offset;  // bytes from the start of the block's shared memory
  uint32_t element_size;
  int number;  // 0 for the first Take of the kernel
};

// Whether the running thread has been told of all of `accesses`, in the barrier interval that it is in.
bool OrderedWithinWarp(const Accesses& accesses);

inline bool Ordered(const Accesses& accesses) {
  if (accesses.barrier != now.barrier) return true;
  if (accesses.warp != now.warp) return false;
  return accesses.full != now.full || accesses.lanes == now.lane_bit || OrderedWithinWarp(accesses);
}

inline Accesses Access(bool atomic) {
  return {now.barrier, now.full, now.lane_bit, static_cast<uint16_t>(now.clock), static_cast<uint8_t>(now.warp),
          atomic};
}

void MergeAccess(Accesses& accesses, bool atomic);

[[noreturn]] void FailBounds(const Region* region, int64_t index, int64_t count);
[[noreturn]] void FailUninitialised(const Region& region, int64_t index);
[[noreturn]] void FailRace(const Region& region, int64_t index, const char* mine, const Accesses& other,
                           const char* others);

inline void CheckBounds(const Region* region, int64_t index) {
  if (region == nullptr || static_cast<uint64_t>(index) >= static_cast<uint64_t>(region->count)) [[unlikely]]
    FailBounds(region, index, 1);
}

inline void CheckRead(const Region& region, int64_t index) {
  Cell& cell = region.cells[index];
  if (cell.write.barrier < now.start) [[unlikely]]
    FailUninitialised(region, index);
  if (!Ordered(cell.write)) [[unlikely]]
    FailRace(region, index, "reads", cell.write, "wrote");
  Accesses& read = cell.read;
  if (read.barrier == now.barrier && read.warp == now.warp && read.full == now.full && read.clock == now.clock) {
    read.lanes |= now.lane_bit;
  } else if (Ordered(read)) {
    read = Access(false);
  } else {
    MergeAccess(read, false);
  }
}

inline void CheckWrite(const Region& region, int64_t index) {
  Cell& cell = region.cells[index];
  if (!Ordered(cell.write)) [[unlikely]]
    FailRace(region, index, "writes", cell.write, "wrote");
  if (!Ordered(cell.read)) [[unlikely]]
    FailRace(region, index, "writes", cell.read, "read");
  cell.write = Access(false);
  cell.read.barrier = 0;
}

inline void CheckAtomic(const Region& region, int64_t index) {
  Cell& cell = region.cells[index];
  if (cell.write.barrier < now.start) [[unlikely]]
    FailUninitialised(region, index);
  if (!Ordered(cell.read)) [[unlikely]]
    FailRace(region, index, "changes atomically", cell.read, "read");
  cell.read.barrier = 0;
  if (Ordered(cell.write)) {
    cell.write = Access(true);
  } else if (cell.write.atomic) {
    MergeAccess(cell.write, true);
  } else {
    FailRace(region, index, "changes atomically", cell.write, "wrote");
  }
}

}  // namespace jax_tt::emulation
