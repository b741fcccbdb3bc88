#include "ffi/cuda/hash/hash.h"
#include "ffi/cuda/hash/lanes.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    FindKeys(const __grid_constant__ HashDirectory directory, const __grid_constant__ HashSets sets,
             const __grid_constant__ HashBatch batch, const int32_t* guess, int32_t absent, int32_t* slots) {
  const int64_t i = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / HashLanes::kLanes;
  const HashLanes lanes(directory, sets);
  const bool here = i < batch.n && batch.present[i];
  const uint64_t key = here ? HashWord(batch.keys, i) : 0;
  const int32_t known = here && guess != nullptr ? guess[i] : -1;
  const bool wanted = here && (guess == nullptr || (known >= 0 && !directory.Holds(known, key)));
  const int32_t found = lanes.Find(key, wanted);
  const int32_t slot = wanted ? found : known;
  if (i < batch.n && lanes.leads()) slots[i] = here && slot < 0 ? absent : slot;
}

}  // namespace

Status HashFind(cudaStream_t stream, const HashSearch& search) {
  constexpr int kKeys = kThreads / HashLanes::kLanes;
  return Launch(stream, (search.batch.n + kKeys - 1) / kKeys, kThreads, 0, FindKeys, search.directory,
                HashSets(search.directory.sets), search.batch, search.guess, search.absent, search.slots);
}

}  // namespace jax_tt
