#include "ffi/cpu/key_index.h"

#include <utility>

#include "ffi/cpu/prefetch.h"

namespace jax_tt {
namespace {

// Keys whose entries are on their way from memory.
constexpr int64_t kAhead = 8;

}  // namespace

void KeyIndex::Find(const uint64_t* keys, int64_t n, int64_t* numbers) const {
  for (int64_t k = 0; k < n; ++k) {
    Prefetch(keys, k + kAhead, n);
    numbers[k] = entries_[Place(keys[k])].number;
  }
}

void KeyIndex::Set(const uint64_t* keys, const int64_t* numbers, int64_t n) {
  Reserve(size_ + n);
  for (int64_t k = 0; k < n; ++k) {
    Prefetch(keys, k + kAhead, n);
    Entry& entry = entries_[Place(keys[k])];
    size_ += entry.number < 0;
    entry = Entry{keys[k], numbers[k]};
  }
}

void KeyIndex::Erase(const uint64_t* keys, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    Prefetch(keys, k + kAhead, n);
    const uint64_t place = Place(keys[k]);
    if (entries_[place].number >= 0) EraseAt(place);
  }
}

uint64_t KeyIndex::Home(uint64_t key) const {
  // The last steps of MurmurHash3.
  key = (key ^ (key >> 33)) * 0xff51afd7ed558ccdULL;
  key = (key ^ (key >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return (key ^ (key >> 33)) & (entries_.size() - 1);
}

uint64_t KeyIndex::Place(uint64_t key) const {
  uint64_t place = Home(key);
  while (entries_[place].number >= 0 && entries_[place].key != key) place = (place + 1) & (entries_.size() - 1);
  return place;
}

void KeyIndex::Prefetch(const uint64_t* keys, int64_t k, int64_t n) const {
  if (k < n) PrefetchLines(&entries_[Home(keys[k])], 1);
}

void KeyIndex::Reserve(int64_t count) {
  uint64_t capacity = entries_.size();
  while (capacity < 2 * static_cast<uint64_t>(count)) capacity *= 2;
  if (capacity == entries_.size()) return;
  const std::vector<Entry> old = std::exchange(entries_, std::vector<Entry>(capacity, Entry{0, -1}));
  for (const Entry& entry : old) {
    if (entry.number >= 0) entries_[Place(entry.key)] = entry;
  }
}

void KeyIndex::EraseAt(uint64_t hole) {
  --size_;
  const uint64_t mask = entries_.size() - 1;
  for (uint64_t next = (hole + 1) & mask; entries_[next].number >= 0; next = (next + 1) & mask) {
    // An entry may move back into the hole unless its home lies behind it.
    if (((next - Home(entries_[next].key)) & mask) < ((next - hole) & mask)) continue;
    entries_[hole] = entries_[next];
    hole = next;
  }
  entries_[hole].number = -1;
}

}  // namespace jax_tt
