// Ops of hash tables on the CPU: search, insertion, initial rows, exchange of rows, and growth.
//
// Their results do not depend on the number of threads, nor an insertion on the order of a batch.
#ifndef JAX_TT_CPU_HASH_H_
#define JAX_TT_CPU_HASH_H_

#include <stdint.h>

#include <vector>

#include "ffi/common/status.h"
#include "ffi/core/hash.h"
#include "ffi/cpu/kernels/hash_kernels.h"
#include "ffi/cpu/pool.h"

namespace jax_tt {

// The keys of a call.
struct HashBatch {
  const uint32_t* keys = nullptr;  // [n, 2]
  const bool* present = nullptr;   // [n]
  int64_t n = 0;
};

// slots[n]: slot of each key, -1 where it is not in the directory or the position is not present.
void HashFind(const HashDirectory& directory, const HashBatch& batch, const Pool& pool, int32_t* slots);

// What an insertion did; jax_tt/_hash/directory.py says what is in it.
struct HashInsertion {
  int32_t* slots = nullptr;        // [n]
  uint32_t* keys = nullptr;        // [n, 2]
  uint32_t* old_keys = nullptr;    // [n, 2]
  uint32_t* old_scores = nullptr;  // [n, 2]
  int32_t* old_touched = nullptr;  // [n]
  int32_t* counts = nullptr;       // [kHashCounts]
};

// Finds or inserts the keys of a batch.  `given` [n, 2] is only read under HashPolicy::kCustom.
Status HashInsert(const HashDirectory& directory, const HashBatch& batch, const uint32_t* given, const HashStamp& stamp,
                  int64_t min_age, const Pool& pool, const HashInsertion& done);

// rows[n, features]: the initial rows of the keys that are present; the others are left as they are.
template <typename T>
void HashInitial(const InitialValues& values, const HashBatch& batch, int64_t features, const Pool& pool, T* rows);

// An array whose entries are exchanged.
struct HashArray {
  char* entries = nullptr;     // [capacity] of entry_bytes each
  const char* from = nullptr;  // the new ones [n], or one number for all elements
  char* old = nullptr;         // [n], null if not asked for
  int64_t entry_bytes = 0, item_bytes = 0;
  bool constant = false;
};

// Exchanges the entries in slots[n]; a slot that is not in [0, capacity) is skipped, and its old entry 0.
Status HashExchange(const std::vector<HashArray>& arrays, const int32_t* slots, int64_t n, int64_t capacity,
                    const Pool& pool);

// An array that grows with a directory.
struct HashGrown {
  const char* before = nullptr;
  char* after = nullptr;
  int64_t entry_bytes = 0;
};

// Moves the keys of a directory, and their entries, into one with twice the sets; what is empty there is 0.
void HashDouble(const HashDirectory& before, const HashDirectory& after, const std::vector<HashGrown>& arrays,
                const Pool& pool);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_HASH_H_
