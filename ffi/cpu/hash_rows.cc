// Rows of hash tables: initial values and exchange.
#include <string.h>

#include <algorithm>
#include <vector>

#include "ffi/common/half.h"
#include "ffi/cpu/hash.h"
#include "ffi/cpu/prefetch.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {
namespace {

// The positions up to the last one for which `wanted(position)` is true.  The new keys of a batch come first, and most
// often there are few: there is no need to wake other threads for the rest.
template <typename F>
int64_t CountUpToLast(int64_t n, F&& wanted) {
  while (n > 0 && !wanted(n - 1)) --n;
  return n;
}

}  // namespace

template <typename T>
void HashInitial(const InitialValues& values, const HashBatch& batch, int64_t features, const Pool& pool, T* rows) {
  constexpr int64_t kBlock = 128;
  const HashKernels& kernels = GetHashKernels();
  Phases phases;
  const int64_t count = CountUpToLast(batch.n, [&](int64_t i) { return batch.present[i]; });
  phases.AddBlocks(count, kBlock, [&](int64_t i, int64_t end, int) {
    float part[kInitialPart];
    for (; i < end; ++i) {
      if (!batch.present[i]) continue;
      T* const row = rows + i * features;
      for (int64_t begin = 0; begin < features; begin += kInitialPart) {
        const int64_t width = std::min(kInitialPart, features - begin);
        kernels.initial_part(values, HashWord(batch.keys, i), begin, width, part);
        for (int64_t j = 0; j < width; ++j) Round(static_cast<typename ComputeType<T>::type>(part[j]), row + begin + j);
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
  const bool old_ones = std::any_of(arrays.begin(), arrays.end(), [](const HashArray& a) { return a.old != nullptr; });
  const int64_t count = old_ones ? n : CountUpToLast(n, [&](int64_t i) { return valid(slots[i]); });
  Phases phases;
  phases.AddBlocks(count, kBlock, [&](int64_t begin, int64_t end, int) {
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
