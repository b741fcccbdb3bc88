// Hash tables on the GPU.  Every function only enqueues work on the stream.  ffi/core/hash.h has the arithmetic.
//
// Their results do not depend on the order in which threads run, nor an insertion on the order of a batch.
#pragma once

#include <stdint.h>

#include <string_view>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/core/hash.h"
#include "ffi/core/hash_calls.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// Bytes of workspace for an op ("insert" or "double") on n keys and a directory of this size.
int64_t HashWorkspace(std::string_view op, int64_t n, int64_t sets, int64_t ways);

Status HashFind(cudaStream_t stream, const HashSearch& search);

// Most keys that one call can insert into a table: its tables number twice as many entries, and one more, in 32 bits.
constexpr int64_t kMaxHashKeys = int64_t{1} << 30;

// Finds or inserts the keys of a batch, in place.
Status HashInsert(cudaStream_t stream, const HashEntry& entry, void* workspace);
int64_t HashInsertWorkspace(const HashDirectory& directory, int64_t n);

// Sets the numbers of batches of a table back where its clock has come to an end.
Status HashSetBack(cudaStream_t stream, const HashClock& clock);

// rows[n, features]: the initial rows of the keys that are present; the others are left as they are.
template <typename T>
Status HashInitial(cudaStream_t stream, const HashInitialArrays& values, const HashBatch& batch, int64_t features,
                   T* rows);

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
