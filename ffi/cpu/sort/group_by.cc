#include "ffi/cpu/sort/group_by.h"

#include "ffi/cpu/sort/radix_sort.h"

namespace jax_tt {
template <typename Item>
void Grouper::SortItems(const uint64_t* keys, int64_t n, int bits, int32_t* order) {
  Item* from = reinterpret_cast<Item*>(buffer_);
  for (int64_t i = 0; i < n; ++i) from[i] = Item::Make(keys[i], static_cast<int32_t>(i));
  const Item* sorted = RadixSort(from, from + n, n, bits);
  for (int64_t i = 0; i < n; ++i) order[i] = sorted[i].item();
}

void Grouper::Sort(const uint64_t* keys, int64_t n, uint64_t range, int32_t* order) {
  const int bits = BitsFor(range);
  if (bits <= 32)
    SortItems<PackedItem>(keys, n, bits, order);
  else
    SortItems<WideItem>(keys, n, bits, order);
}

int64_t Grouper::Runs(const uint64_t* keys, int64_t n, const int32_t* order, int32_t* end, int32_t* group_of,
                      uint64_t* group_key) {
  int64_t groups = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t key = keys[order[i]];
    if (groups == 0 || key != group_key[groups - 1]) group_key[groups++] = key;
    end[groups - 1] = static_cast<int32_t>(i + 1);
    group_of[order[i]] = static_cast<int32_t>(groups - 1);
  }
  return groups;
}

}  // namespace jax_tt
