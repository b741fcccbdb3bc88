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

// slots[n]: slot of each key, -1 where it is not in the directory or the position is not present.
void HashFind(const HashDirectory& directory, const HashBatch& batch, const Pool& pool, int32_t* slots);

// Finds or inserts the keys of a batch.  `given` [n, 2] is only read under HashPolicy::kCustom.
Status HashInsert(const HashDirectory& directory, const HashBatch& batch, const uint32_t* given, const HashStamp& stamp,
                  int64_t min_age, const Pool& pool, const HashInsertion& done);

// rows[n, features]: the initial rows of the keys that are present; the others are left as they are.
template <typename T>
void HashInitial(const InitialValues& values, const HashBatch& batch, int64_t features, const Pool& pool, T* rows);

// Exchanges the entries in slots[n]; a slot that is not in [0, capacity) is skipped, and its old entry 0.
Status HashExchange(const std::vector<HashArray>& arrays, const int32_t* slots, int64_t n, int64_t capacity,
                    const Pool& pool);

// Moves the keys of a directory, and their entries, into one with twice the sets; what is empty there is 0.
void HashDouble(const HashDirectory& before, const HashDirectory& after, const std::vector<HashGrown>& arrays,
                const Pool& pool);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_HASH_H_
