#include "ffi/cpu/group_by.h"

#include <utility>

namespace jax_tt {
namespace {

// The counters of digits of up to 12 bits fit in the first-level cache.
constexpr int kMaxDigitBits = 12;

// Key and item in one word for keys of up to 32 bits, the common case, to halve the memory traffic.
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

int BitsFor(uint64_t range) {
  int bits = 0;
  for (uint64_t largest = range == 0 ? 0 : range - 1; largest != 0; largest >>= 1) ++bits;
  return bits;
}

}  // namespace

template <typename Item>
void Grouper::RadixSort(const uint64_t* keys, int64_t n, int bits, int32_t* order) {
  Item* from = reinterpret_cast<Item*>(buffer_);
  Item* to = from + n;
  for (int64_t i = 0; i < n; ++i) from[i] = Item::Make(keys[i], static_cast<int32_t>(i));
  const int digit_limit = n < 1024 ? 8 : kMaxDigitBits;
  const int passes = (bits + digit_limit - 1) / digit_limit;
  for (int pass = 0; pass < passes; ++pass) {
    const int low = bits * pass / passes, high = bits * (pass + 1) / passes;
    const uint64_t mask = (uint64_t{1} << (high - low)) - 1;
    int32_t count[(1 << kMaxDigitBits) + 1] = {};
    for (int64_t i = 0; i < n; ++i) ++count[((from[i].key() >> low) & mask) + 1];
    for (uint64_t digit = 1; digit <= mask; ++digit) count[digit] += count[digit - 1];
    for (int64_t i = 0; i < n; ++i) to[count[(from[i].key() >> low) & mask]++] = from[i];
    std::swap(from, to);
  }
  for (int64_t i = 0; i < n; ++i) order[i] = from[i].item();
}

void Grouper::Sort(const uint64_t* keys, int64_t n, uint64_t range, int32_t* order) {
  const int bits = BitsFor(range);
  if (bits <= 32)
    RadixSort<PackedItem>(keys, n, bits, order);
  else
    RadixSort<WideItem>(keys, n, bits, order);
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
