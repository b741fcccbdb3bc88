#include "ffi/cuda/hash.h"
#include "ffi/cuda/hash_lanes.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    FindKeys(const __grid_constant__ HashDirectory directory, const __grid_constant__ HashSets sets,
             const __grid_constant__ HashBatch batch, int32_t absent, int32_t* slots) {
  const int64_t i = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / HashLanes::kLanes;
  const HashLanes lanes(directory, sets);
  const bool here = i < batch.n && batch.present[i];
  const int32_t slot = lanes.Find(here ? HashWord(batch.keys, i) : 0, here);
  if (i < batch.n && lanes.leads()) slots[i] = here && slot < 0 ? absent : slot;
}

}  // namespace

Status HashFind(cudaStream_t stream, const HashSearch& search) {
  constexpr int kKeys = kThreads / HashLanes::kLanes;
  return Launch(stream, (search.batch.n + kKeys - 1) / kKeys, kThreads, 0, FindKeys, search.directory,
                HashSets(search.directory.sets), search.batch, search.absent, search.slots);
}

}  // namespace jax_tt
