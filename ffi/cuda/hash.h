// Hash tables on the GPU.  Every function only enqueues work on the stream.  ffi/core/hash.h has the arithmetic.
//
// Their results do not depend on the order in which threads run, nor an insertion on the order of a batch.
#ifndef JAX_TT_CUDA_HASH_H_
#define JAX_TT_CUDA_HASH_H_

#include <stdint.h>

#include <string_view>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/core/hash.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// Bytes of workspace for an op ("insert" or "double") on n keys and a directory of this size.
int64_t HashWorkspace(std::string_view op, int64_t n, int64_t sets, int64_t ways);

// slots[n]: slot of each key, -1 where it is not in the directory or the position is not present.
Status HashFind(cudaStream_t stream, const HashDirectory& directory, const HashBatch& batch, int32_t* slots);

// The keys of an insertion and what their scores depend on.  The pointers are memory of the device.
struct HashRequests {
  HashBatch batch;
  const uint32_t* given = nullptr;  // [n, 2], only read under kCustom
  const int32_t* now = nullptr;     // [1]
  const uint32_t* epoch = nullptr;  // [1]
  HashPolicy policy = HashPolicy::kNone;
  int64_t min_age = 1;
};

// Most keys that one call can insert: its tables number twice as many entries, and one more, in 32 bits.
constexpr int64_t kMaxHashKeys = int64_t{1} << 30;

// Finds or inserts the keys of a batch, in place.
Status HashInsert(cudaStream_t stream, const HashDirectory& directory, const HashRequests& asked,
                  const HashInsertion& done, void* workspace);
int64_t HashInsertWorkspace(const HashDirectory& directory, int64_t n);

// Elements of initial rows: a distribution, a seed and a factor.  The pointers are memory of the device.
struct InitialValues {
  const int32_t* quantiles = nullptr;  // [kQuantiles]
  const uint32_t* seed = nullptr;      // [2]
  const float* scale = nullptr;        // [1]
  bool with_sign = false;
};

// rows[n, features]: the initial rows of the keys that are present; the others are left as they are.
template <typename T>
Status HashInitial(cudaStream_t stream, const InitialValues& values, const HashBatch& batch, int64_t features, T* rows);

// Slots of entries that are moved; others than 0 to capacity - 1 are skipped.
struct HashSlots {
  const int32_t* slots = nullptr;  // [n]
  int64_t n = 0, capacity = 0;

  JAX_TT_INLINE bool IsValid(int32_t slot) const { return slot >= 0 && slot < capacity; }
};

// old[n]: the entries in these slots, each of so many bytes; 0 where a slot is skipped.
Status HashTake(cudaStream_t stream, const char* entries, int64_t entry_bytes, const HashSlots& slots, char* old);

// Exchanges the entries in these slots.
Status HashExchange(cudaStream_t stream, const std::vector<HashArray>& arrays, const HashSlots& slots);

// Moves the keys of a directory, and their entries, into one with twice the sets; what is empty there is 0.
Status HashDouble(cudaStream_t stream, const HashDirectory& before, const HashDirectory& after,
                  const std::vector<HashGrown>& arrays, void* workspace);
int64_t HashDoubleWorkspace(const HashDirectory& before);

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_HASH_H_
