// Ops of hash tables on the CPU: search, insertion, initial rows, exchange of rows, and growth.
//
// Their results do not depend on the number of threads, nor an insertion on the order of a batch.
#pragma once

#include <stdint.h>

#include <memory>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/core/hash.h"
#include "ffi/core/hash_calls.h"
#include "ffi/cpu/kernels/hash_kernels.h"
#include "ffi/cpu/passes.h"
#include "ffi/cpu/pool.h"

namespace jax_tt {

// Each is the part of one table in a call.
std::unique_ptr<Pass> HashFind(const HashSearch& search);
// `tasks`: in how many parts the batch is looked at, at least 1.
std::unique_ptr<Pass> HashInsert(const HashEntry& entry, int64_t tasks);
// rows[n, features]: the initial rows of the keys that are present; the others are left as they are.
template <typename T>
std::unique_ptr<Pass> HashInitial(const InitialValues& values, const HashBatch& batch, int64_t features, T* rows);
// rows[capacity, features]: the initial rows of all keys in slots[n]; a slot that is not in [0, capacity) is skipped.
template <typename T>
std::unique_ptr<Pass> HashReset(const InitialValues& values, const HashBatch& batch, const int32_t* slots,
                                int64_t capacity, int64_t features, T* rows);
// Exchanges the entries in slots[n]; a slot that is not in [0, capacity) is skipped, and its old entry 0.
std::unique_ptr<Pass> HashExchange(HashExchanged exchange);

// Warns or fails where a count of keys is not 0.
Status CheckKeys(const HashCheck& check, int64_t count);

// Moves the keys of a directory, and their entries, into one with twice the sets; what is empty there is 0.
void HashDouble(const HashDirectory& before, const HashDirectory& after, const std::vector<HashGrown>& arrays,
                const Pool& pool);

}  // namespace jax_tt
