#include "ffi/cpu/hash/place.h"

#include <algorithm>

#include "ffi/cpu/prefetch.h"

namespace jax_tt {
namespace {

// Items whose sets are prefetched before they are looked at.
constexpr int64_t kAhead = 24;

// Calls body(first, last) for every run of items with the same key.
template <typename F>
void ForRuns(PackedItem* items, int64_t count, F&& body) {
  for (int64_t begin = 0, end; begin < count; begin = end) {
    for (end = begin + 1; end < count && items[end].key() == items[begin].key();) ++end;
    body(items + begin, items + end);
  }
}

}  // namespace

void HashPlacement::Request(Workspace& workspace) {
  workspace.Request(&items_, asked_.batch.n);
  workspace.Request(&other_items_, asked_.batch.n);
  workspace.Request(&keys_, asked_.batch.n);
}

HashPlacement::Counts HashPlacement::Place(int64_t misses) {
  if (misses == 0) return {};
  misses_ = misses;
  Gather();
  MakeDistinct();
  ChooseHomes();
  const int rounds = stamp_.policy == HashPolicy::kNone ? 2 : 4;
  for (int round = 0; round < rounds; ++round) Round(round % 2, round >= 2);

  int64_t inserted = 0, evicted = 0;
  for (int64_t k = 0; k < distinct_; ++k)
    if (keys_[k].slot >= 0)
      items_[inserted++] = PackedItem::Make(static_cast<uint64_t>(keys_[k].slot), static_cast<int32_t>(k));
  const PackedItem* by_slot =
      RadixSort(items_, other_items_, inserted, BitsFor(static_cast<uint64_t>(directory_.capacity())));
  for (int64_t i = 0; i < inserted; ++i) {
    const NewKey& key = keys_[by_slot[i].item()];
    done_.slots[i] = key.slot;
    SetHashWord(done_.keys, i, key.key);
    if (done_.old_keys != nullptr) SetHashWord(done_.old_keys, i, key.old_key);
    if (done_.old_scores != nullptr) SetHashWord(done_.old_scores, i, key.old_score);
    if (done_.old_touched != nullptr) done_.old_touched[i] = key.old_touched;
    evicted += key.old_touched > 0;
  }
  return {distinct_, inserted, evicted};
}

void HashPlacement::Gather() {
  const HashSets sets(directory_.sets);
  const HashBatch& batch = asked_.batch;
  int64_t count = 0;
  for (int64_t i = 0; count < misses_; ++i) {
    if (done_.found[i] >= 0 || !batch.present[i]) continue;
    const uint32_t set = sets.Of(FirstHash(batch.keys[2 * i], batch.keys[2 * i + 1]));
    items_[count++] = PackedItem::Make(set, static_cast<int32_t>(i));
  }
}

// Keys with the same first set may be the same; these are few, in ascending order.
void HashPlacement::MakeDistinct() {
  const auto key_of = [this](PackedItem item) { return HashWord(asked_.batch.keys, item.item()); };
  PackedItem* by_set = RadixSort(items_, other_items_, misses_, BitsFor(static_cast<uint64_t>(directory_.sets)));
  ForRuns(by_set, misses_, [&](PackedItem* item, PackedItem* end) {
    std::sort(item, end, [&](PackedItem a, PackedItem b) { return key_of(a) < key_of(b); });
    while (item < end) {
      const uint64_t key = key_of(*item);
      const auto first = static_cast<int32_t>(item->key());
      uint64_t given = 0;
      uint32_t count = 0;
      for (; item < end && key_of(*item) == key; ++item, ++count)
        if (stamp_.policy == HashPolicy::kCustom) given = std::max(given, HashWord(asked_.given, item->item()));
      keys_[distinct_++] = {key, HashScore(0, count, given, stamp_), 0, 0, {first, 0}, {}, -1, 0};
    }
  });
}

// The set with fewer keys is tried first.
void HashPlacement::ChooseHomes() {
  const HashSets sets(directory_.sets);
  const auto touched = [this](int64_t set) { return directory_.touched + set * directory_.ways; };
  const auto occupied = [&](int64_t set) {
    int64_t count = 0;
    for (int64_t way = 0; way < directory_.ways; ++way) count += touched(set)[way] > 0;
    return count;
  };
  for (int64_t k = 0; k < distinct_ + kAhead; ++k) {
    if (k < distinct_) {
      NewKey& key = keys_[k];
      const uint32_t hash = SecondHash(static_cast<uint32_t>(key.key >> 32), static_cast<uint32_t>(key.key));
      key.homes[1] = static_cast<int32_t>(sets.Of(hash));
      for (const int32_t home : key.homes)
        PrefetchLines(touched(home), directory_.ways * static_cast<int64_t>(sizeof(int32_t)));
    }
    if (k < kAhead) continue;
    NewKey& key = keys_[k - kAhead];
    int64_t counts[2] = {occupied(key.homes[0]), occupied(key.homes[1])};
    if (counts[1] < counts[0]) {
      std::swap(key.homes[0], key.homes[1]);
      std::swap(counts[0], counts[1]);
    }
    for (int side = 0; side < 2; ++side) key.full[side] = counts[side] == directory_.ways;
  }
}

void HashPlacement::Round(int side, bool evict) {
  int64_t waiting = 0;
  for (int64_t k = 0; k < distinct_; ++k)
    if (keys_[k].slot < 0 && (evict || !keys_[k].full[side]))
      items_[waiting++] = PackedItem::Make(static_cast<uint64_t>(keys_[k].homes[side]), static_cast<int32_t>(k));
  PackedItem* const by_set = RadixSort(items_, other_items_, waiting, BitsFor(static_cast<uint64_t>(directory_.sets)));
  int64_t fetched = 0;
  ForRuns(by_set, waiting, [&](PackedItem* begin, PackedItem* end) {
    for (; fetched < std::min(waiting, end - by_set + kAhead); ++fetched)
      PrefetchSet(static_cast<int64_t>(by_set[fetched].key()));
    std::sort(begin, end, [this](PackedItem a, PackedItem b) {
      const NewKey &left = keys_[a.item()], &right = keys_[b.item()];
      return HashEntersBefore(left.score, left.key, right.score, right.key);
    });
    const auto set = static_cast<int64_t>(begin->key());
    evict ? Replace(set, begin, end - begin) : FillEmpty(set, begin, end - begin);
  });
}

void HashPlacement::FillEmpty(int64_t set, const PackedItem* keys, int64_t count) {
  int64_t slot = set * directory_.ways;
  for (const int64_t end = slot + directory_.ways; slot < end && count > 0; ++slot) {
    if (directory_.touched[slot] > 0) continue;
    Put(&keys_[keys->item()], slot);
    ++keys;
    --count;
  }
}

void HashPlacement::Replace(int64_t set, const PackedItem* keys, int64_t count) {
  struct Leaving {
    HashLeaving entry;
    int64_t slot;

    bool operator<(const Leaving& other) const { return entry < other.entry; }
  } leaving[kMaxHashWays];
  int64_t open = 0;
  for (int64_t slot = set * directory_.ways, end = slot + directory_.ways; slot < end; ++slot) {
    const int32_t touched = directory_.touched[slot];
    if (touched <= 0 || touched > static_cast<int32_t>(stamp_.now) - asked_.min_age) continue;
    leaving[open++] = {{directory_.WordOf(directory_.scores, slot), touched, directory_.WordOf(directory_.keys, slot)},
                       slot};
  }
  std::sort(leaving, leaving + open);
  for (int64_t rank = 0; rank < std::min(count, open); ++rank) {
    NewKey& key = keys_[keys[rank].item()];
    const HashLeaving& old = leaving[rank].entry;
    if (key.score < old.score) return;  // as for all that follow
    key.old_key = old.key;
    key.old_score = old.score;
    key.old_touched = old.touched;
    Put(&key, leaving[rank].slot);
  }
}

void HashPlacement::Put(NewKey* key, int64_t slot) {
  key->slot = static_cast<int32_t>(slot);
  directory_.SetWordOf(directory_.keys, slot, key->key);
  directory_.SetWordOf(directory_.scores, slot, key->score);
  directory_.touched[slot] = static_cast<int32_t>(stamp_.now);
}

void HashPlacement::PrefetchSet(int64_t set) const {
  const int64_t first = set * directory_.ways, bytes = directory_.ways * static_cast<int64_t>(sizeof(int32_t));
  PrefetchLines(directory_.touched + first, bytes);
  PrefetchLines(directory_.keys + 2 * first, 2 * bytes);
  PrefetchLines(directory_.scores + 2 * first, 2 * bytes);
}

}  // namespace jax_tt
