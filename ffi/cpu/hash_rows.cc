// Rows of hash tables: initial values and exchange.
#include <string.h>

#include <algorithm>
#include <vector>

#include "ffi/common/half.h"
#include "ffi/cpu/hash.h"
#include "ffi/cpu/prefetch.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {

template <typename T>
void HashInitial(const InitialValues& values, const HashBatch& batch, int64_t features, const Pool& pool, T* rows) {
  constexpr int64_t kBlock = 128;
  const HashKernels& kernels = GetHashKernels();
  Phases phases;
  phases.AddBlocks(batch.n, kBlock, [&](int64_t i, int64_t end, int) {
    float part[kInitialPart];
    for (; i < end; ++i) {
      if (!batch.present[i]) continue;
      T* const row = rows + i * features;
      for (int64_t begin = 0; begin < features; begin += kInitialPart) {
        const int64_t count = std::min(kInitialPart, features - begin);
        kernels.initial_part(values, HashWord(batch.keys, i), begin, count, part);
        for (int64_t j = 0; j < count; ++j) Round(static_cast<typename ComputeType<T>::type>(part[j]), row + begin + j);
      }
    }
  });
  pool.Run(phases);
}

template void HashInitial(const InitialValues&, const HashBatch&, int64_t, const Pool&, float*);
template void HashInitial(const InitialValues&, const HashBatch&, int64_t, const Pool&, double*);
template void HashInitial(const InitialValues&, const HashBatch&, int64_t, const Pool&, bfloat16*);
template void HashInitial(const InitialValues&, const HashBatch&, int64_t, const Pool&, float16*);

Status HashExchange(const std::vector<HashArray>& arrays, const int32_t* slots, int64_t n, int64_t capacity,
                    const Pool& pool) {
  constexpr int64_t kBlock = 256, kAhead = 8;
  // A number for all elements, as an entry that is full of it.
  std::vector<char*> filled(arrays.size());
  Workspace workspace;
  for (size_t k = 0; k < arrays.size(); ++k)
    if (arrays[k].constant) workspace.Request(&filled[k], arrays[k].entry_bytes);
  JAX_TT_RETURN_IF_ERROR(workspace.Allocate());
  for (size_t k = 0; k < arrays.size(); ++k)
    if (const HashArray& array = arrays[k]; array.constant)
      for (int64_t offset = 0; offset < array.entry_bytes; offset += array.item_bytes)
        memcpy(filled[k] + offset, array.from, static_cast<size_t>(array.item_bytes));
  const auto valid = [=](int32_t slot) { return slot >= 0 && slot < capacity; };
  Phases phases;
  phases.AddBlocks(n, kBlock, [&](int64_t begin, int64_t end, int) {
    for (size_t k = 0; k < arrays.size(); ++k) {
      const HashArray& array = arrays[k];
      const auto bytes = static_cast<size_t>(array.entry_bytes);
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end && valid(slots[i + kAhead]))
          PrefetchLines(array.entries + slots[i + kAhead] * array.entry_bytes,
                        std::min<int64_t>(array.entry_bytes, 512));
        char* const old = array.old == nullptr ? nullptr : array.old + i * array.entry_bytes;
        if (!valid(slots[i])) {
          if (old != nullptr) memset(old, 0, bytes);
          continue;
        }
        char* const entry = array.entries + slots[i] * array.entry_bytes;
        if (old != nullptr) memcpy(old, entry, bytes);
        memcpy(entry, array.constant ? filled[k] : array.from + i * array.entry_bytes, bytes);
      }
    }
  });
  pool.Run(phases);
  return {};
}

}  // namespace jax_tt
