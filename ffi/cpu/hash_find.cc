#include "ffi/cpu/hash.h"

namespace jax_tt {

void HashFind(const HashDirectory& directory, const HashBatch& batch, const Pool& pool, int32_t* slots) {
  constexpr int64_t kBlock = 1024;
  const HashKernels& kernels = GetHashKernels();
  Phases phases;
  phases.AddBlocks(batch.n, kBlock, [&](int64_t begin, int64_t end, int) {
    kernels.find(directory, batch.keys + 2 * begin, batch.present + begin, end - begin, slots + begin);
  });
  pool.Run(phases);
}

}  // namespace jax_tt
