#include "ffi/cpu/tiers/key_index.h"

#include <algorithm>
#include <utility>

#include "ffi/cpu/prefetch.h"

namespace jax_tt {
namespace {

// Keys whose entries are on their way from memory.
constexpr int64_t kAhead = 16;
// Places of a segment that is split, and places of the directory for one segment, beyond which it grows instead: keys
// whose hashes begin with the same bits.
constexpr uint64_t kSegmentPlaces = 4096, kMostPerSegment = 16;

}  // namespace

void KeyIndex::Find(const uint64_t* keys, int64_t n, int64_t* numbers) const {
  for (int64_t k = 0; k < n; ++k) {
    Prefetch(keys, k + kAhead, n);
    const uint64_t hash = Hash(keys[k]);
    numbers[k] = SegmentOf(hash).At(hash, keys[k]).number;
  }
}

void KeyIndex::Set(const uint64_t* keys, const int64_t* numbers, int64_t n, int64_t* before) {
  for (int64_t k = 0; k < n; ++k) {
    Prefetch(keys, k + kAhead, n);
    const uint64_t hash = Hash(keys[k]);
    Segment* segment = &SegmentOf(hash);
    Entry* entry = &segment->At(hash, keys[k]);
    before[k] = entry->number;
    if (before[k] < 0) {
      for (; segment->full(); entry = &segment->At(hash, keys[k])) {
        Grow(hash);
        segment = &SegmentOf(hash);
      }
      ++segment->size;
      ++size_;
    }
    *entry = Entry{keys[k], numbers[k]};
  }
}

void KeyIndex::Erase(const uint64_t* keys, int64_t n, int64_t* before) {
  for (int64_t k = 0; k < n; ++k) {
    Prefetch(keys, k + kAhead, n);
    const uint64_t hash = Hash(keys[k]);
    Segment& segment = SegmentOf(hash);
    Entry& entry = segment.At(hash, keys[k]);
    before[k] = entry.number;
    if (before[k] < 0) continue;
    segment.Erase(&entry);
    --size_;
  }
}

uint64_t KeyIndex::Hash(uint64_t key) {
  // The last steps of MurmurHash3.
  key = (key ^ (key >> 33)) * 0xff51afd7ed558ccdULL;
  key = (key ^ (key >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return key ^ (key >> 33);
}

void KeyIndex::Prefetch(const uint64_t* keys, int64_t k, int64_t n) const {
  if (k >= n) return;
  const uint64_t hash = Hash(keys[k]);
  const Segment& segment = SegmentOf(hash);
  PrefetchLines(segment.entries.data() + (hash & segment.mask()), 1);
}

void KeyIndex::Grow(uint64_t hash) {
  Segment& segment = SegmentOf(hash);
  const uint64_t places = segment.entries.size();
  if (places >= kSegmentPlaces && directory_.size() < kMostPerSegment * segments_.size()) return Split(hash);
  segment.size = 0;
  Move(std::exchange(segment.entries, std::vector<Entry>(2 * places, Entry{0, -1})));
}

void KeyIndex::Split(uint64_t hash) {
  const int bits = SegmentOf(hash).bits;
  if (bits == bits_) {
    std::vector<uint32_t> doubled(2 * directory_.size());
    for (size_t k = 0; k < doubled.size(); ++k) doubled[k] = directory_[k / 2];
    directory_ = std::move(doubled);
    ++bits_;
  }
  const auto added = static_cast<uint32_t>(segments_.size());
  segments_.emplace_back();
  Segment& segment = SegmentOf(hash);
  const uint64_t places = segment.entries.size();
  segments_[added].entries.resize(places, Entry{0, -1});
  segments_[added].bits = segment.bits = bits + 1;
  // Half of the hashes that the segment had.
  const uint64_t count = uint64_t{1} << (bits_ - bits), first = PlaceOf(hash) / count * count;
  std::fill_n(directory_.begin() + static_cast<int64_t>(first + count / 2), count / 2, added);
  segment.size = 0;
  Move(std::exchange(segment.entries, std::vector<Entry>(places, Entry{0, -1})));
}

void KeyIndex::Move(const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    if (entry.number < 0) continue;
    const uint64_t hash = Hash(entry.key);
    Segment& segment = SegmentOf(hash);
    segment.At(hash, entry.key) = entry;
    ++segment.size;
  }
}

const KeyIndex::Entry& KeyIndex::Segment::At(uint64_t hash, uint64_t key) const {
  uint64_t place = hash & mask();
  while (entries[place].number >= 0 && entries[place].key != key) place = (place + 1) & mask();
  return entries[place];
}

void KeyIndex::Segment::Erase(Entry* entry) {
  --size;
  auto hole = static_cast<uint64_t>(entry - entries.data());
  for (uint64_t next = (hole + 1) & mask(); entries[next].number >= 0; next = (next + 1) & mask()) {
    // An entry may move back into the hole unless its home lies behind it.
    if (((next - Hash(entries[next].key)) & mask()) < ((next - hole) & mask())) continue;
    entries[hole] = entries[next];
    hole = next;
  }
  entries[hole].number = -1;
}

}  // namespace jax_tt
