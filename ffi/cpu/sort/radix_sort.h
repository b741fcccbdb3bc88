// Stable sorting of items by an unsigned key.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <utility>

namespace jax_tt {

// Key and number of an item in one word for keys of up to 32 bits, the common case, to halve the memory traffic.
struct PackedItem {
  uint64_t word;
  static PackedItem Make(uint64_t key, int32_t item) { return {key << 32 | static_cast<uint32_t>(item)}; }
  uint64_t key() const { return word >> 32; }
  int32_t item() const { return static_cast<int32_t>(word); }
};
struct WideItem {
  uint64_t word;
  uint64_t index;
  static WideItem Make(uint64_t key, int32_t item) { return {key, static_cast<uint64_t>(item)}; }
  uint64_t key() const { return word; }
  int32_t item() const { return static_cast<int32_t>(index); }
};

// The bits of keys below `range`.
inline int BitsFor(uint64_t range) {
  int bits = 0;
  for (uint64_t largest = range == 0 ? 0 : range - 1; largest != 0; largest >>= 1) ++bits;
  return bits;
}

// Sorts items[n] by the low `bits` bits of their keys, and returns where the result is: `items` or `other`.
template <typename Item>
Item* RadixSort(Item* items, Item* other, int64_t n, int bits) {
  constexpr int kMaxDigitBits = 12;  // whose counters fit in the first-level cache
  int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  // Clearing and adding up the counters costs about as much as moving half as many items.
  const auto cost = [n, bits](int count) { return count * (2 * n + (int64_t{1} << ((bits + count - 1) / count))); };
  while (passes > 0 && passes < bits && cost(passes + 1) < cost(passes)) ++passes;
  for (int pass = 0; pass < passes; ++pass) {
    const int low = bits * pass / passes, high = bits * (pass + 1) / passes;
    const uint64_t mask = (uint64_t{1} << (high - low)) - 1;
    int32_t count[(1 << kMaxDigitBits) + 1];
    std::fill_n(count, mask + 2, 0);
    for (int64_t i = 0; i < n; ++i) ++count[((items[i].key() >> low) & mask) + 1];
    for (uint64_t digit = 1; digit <= mask; ++digit) count[digit] += count[digit - 1];
    for (int64_t i = 0; i < n; ++i) other[count[(items[i].key() >> low) & mask]++] = items[i];
    std::swap(items, other);
  }
  return items;
}

}  // namespace jax_tt
