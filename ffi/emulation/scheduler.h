// Runs the threads of one block as fibers, in a seeded order, and gives them what they wait for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/emulation/order.h"
#include "ffi/emulation/shadow.h"

namespace jax_tt::emulation {

enum class BarrierKind : uint8_t { kPlain, kCount, kAnd, kOr };
enum class CollectiveKind : uint8_t {
  kSync,
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAny,
  kAll,
  kMatchAny
};

// What a grid runs: `call(kernel)` is one thread's work.
struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes;
  void (*call)(const void* kernel);
  const void* kernel;
  uint64_t seed;  // of the order of blocks and threads; 0 is the natural order
};

// Runs the grid to its end; returns the first violation, or nothing.
std::string RunGrid(const Grid& grid);

// For the thread that runs: waits for the others, and returns what the whole of them gives it.
int BlockBarrier(BarrierKind kind, int predicate, const char* file, int line);
// `value` is the lane's contribution, `argument` the lane, delta or mask of a shuffle.
uint64_t WarpCollective(CollectiveKind kind, uint32_t mask, uint64_t value, uint32_t argument, int width,
                        const char* file, int line);

const WarpOrder& CurrentWarpOrder();

// Take number `number` of the block: the first thread to come defines it, the others must ask for the same.
Region* TakeShared(int number, int64_t offset, int64_t count, size_t element_size);

}  // namespace jax_tt::emulation
