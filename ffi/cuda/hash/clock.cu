// The numbers of batches of hash tables, which are set back before they run out.
#include <algorithm>

#include "ffi/cuda/hash/hash.h"

namespace jax_tt {
namespace {

// A table is set back once in more than 10^9 batches; until then a launch only looks at the clock.
constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 64;
// Last batches and scores of keys, and of keys that wait.
constexpr size_t kMostArrays = 4;

struct Arrays {
  HashNumbers of[kMostArrays];
};

__global__ void __launch_bounds__(kThreads)
    SetBack(const int32_t* clock, int32_t last, int32_t kept, const __grid_constant__ Arrays arrays) {
  const int32_t now = *clock;
  if (now < last) return;
  const auto back = static_cast<uint32_t>(now - kept);
  const int64_t first = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  for (const HashNumbers& numbers : arrays.of)
    for (int64_t i = first; i < numbers.count; i += static_cast<int64_t>(gridDim.x) * kThreads)
      numbers.SetBack(i, back);
}

}  // namespace

Status HashSetBack(cudaStream_t stream, const HashClock& clock) {
  if (clock.numbers.size() > kMostArrays)
    return InvalidArgument("a table has at most four arrays of numbers of batches");
  Arrays arrays;
  int64_t most = 0;
  for (size_t k = 0; k < clock.numbers.size(); ++k) {
    arrays.of[k] = clock.numbers[k];
    most = std::max(most, arrays.of[k].count);
  }
  const int64_t blocks = std::min((most + kThreads - 1) / kThreads, kMostBlocks);
  return Launch(stream, blocks, kThreads, 0, SetBack, clock.clock, static_cast<int32_t>(clock.last),
                static_cast<int32_t>(clock.kept), arrays);
}

}  // namespace jax_tt
