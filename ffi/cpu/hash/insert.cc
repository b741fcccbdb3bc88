#include <string.h>

#include <algorithm>
#include <string_view>

#include "ffi/cpu/hash/hash.h"
#include "ffi/cpu/hash/place.h"
#include "ffi/cpu/prefetch.h"

namespace jax_tt {
namespace {

// Positions that are looked at together; their sets stay in the cache.
constexpr int64_t kTogether = 1024;
// Keys whose scores are prefetched before they are updated.
constexpr int64_t kAhead = 32;

// What a task saw, in a cache line of its own.
struct alignas(64) Seen {
  int64_t requests = 0, misses = 0, unique_hits = 0;
};

Seen Total(const Seen* seen, int64_t tasks) {
  Seen sum;
  for (int64_t k = 0; k < tasks; ++k) {
    sum.requests += seen[k].requests;
    sum.misses += seen[k].misses;
    sum.unique_hits += seen[k].unique_hits;
  }
  return sum;
}

// The task of a key, below `tasks` <= 2^16: all positions of a key are of one task, whose slot no other writes to.
uint32_t TaskOf(const uint32_t* key, uint32_t tasks) { return ((key[0] ^ key[1]) * 0x9E3779B1u >> 16) * tasks >> 16; }

// Some positions of a batch, with their keys side by side.
struct Picked {
  int64_t count = 0;
  int32_t positions[kTogether], slots[kTogether];
  uint32_t keys[2 * kTogether];
  bool present[kTogether];

  // Those of [begin, end), at most kTogether, for which `wanted(position)` is true.
  template <typename F>
  void Pick(const HashBatch& batch, int64_t begin, int64_t end, F&& wanted) {
    count = 0;
    for (int64_t i = begin; i < end; ++i) {  // whether one is wanted cannot be predicted
      positions[count] = static_cast<int32_t>(i);
      memcpy(keys + 2 * count, batch.keys + 2 * i, 2 * sizeof(*keys));
      present[count] = batch.present[i];
      count += wanted(i);
    }
  }

  // Finds their slots, and writes them to `found` by position.
  void Find(const HashDirectory& directory, int32_t* found) {
    GetHashKernels().find(directory, keys, present, count, slots);
    for (int64_t k = 0; k < count; ++k) found[positions[k]] = slots[k];
  }
};

// Updates the scores of the picked keys that have a slot.  kWays is the number of ways, or 0 if it is not known before.
template <int kWays>
void TouchHitsIn(const HashDirectory& directory, const Picked& picked, const uint32_t* given, const HashStamp& stamp,
                 Seen* seen) {
  const bool custom = stamp.policy == HashPolicy::kCustom;
  const auto now = static_cast<int32_t>(stamp.now);
  const auto ways = static_cast<uint32_t>(kWays > 0 ? kWays : directory.ways);
  const auto high_of = [&](int64_t k) {
    const auto slot = static_cast<uint32_t>(std::max(picked.slots[k], 0));
    return directory.scores + slot + static_cast<int64_t>(slot / ways) * ways;
  };
  const auto fetch = [&](int64_t k) {
    PrefetchLines(directory.touched + std::max(picked.slots[k], 0), 1);
    PrefetchLines(high_of(k), 1);
    if (ways > 8) PrefetchLines(high_of(k) + ways, 1);  // else most often the same line
  };
  for (int64_t k = 0; k < std::min(kAhead, picked.count); ++k) fetch(k);
  for (int64_t k = 0; k < picked.count; ++k) {
    if (k + kAhead < picked.count) fetch(k + kAhead);
    seen->requests += picked.present[k];
    if (picked.slots[k] < 0) {
      seen->misses += picked.present[k];
      continue;
    }
    int32_t* const touched = directory.touched + picked.slots[k];
    uint32_t *const high = high_of(k), *const low = high + ways;
    const bool again = *touched == now;
    const uint64_t before = HashWord(*high, *low);
    uint64_t of_batch = custom ? HashWord(given, picked.positions[k]) : 0;
    if (again) of_batch = std::max(of_batch, before);
    const uint64_t score = HashScore(before, 1, of_batch, stamp);
    *high = static_cast<uint32_t>(score >> 32);
    *low = static_cast<uint32_t>(score);
    __atomic_store_n(touched, now, __ATOMIC_RELAXED);  // other tasks may look whether the way is taken
    seen->unique_hits += !again;
  }
}

void TouchHits(const HashDirectory& directory, const Picked& picked, const uint32_t* given, const HashStamp& stamp,
               Seen* seen) {
  const auto touch = directory.ways == 8 ? TouchHitsIn<8> : TouchHitsIn<0>;  // 8 is the default of tables
  touch(directory, picked, given, stamp, seen);
}

// The results of a batch that inserts nothing, in [begin, end), but for `found`.
void ClearInsertion(const HashInsertion& done, int64_t begin, int64_t end, int64_t capacity) {
  const auto clear = [=](auto* words, int64_t width) {
    if (words == nullptr) return;
    memset(words + width * begin, 0, static_cast<size_t>(width * (end - begin)) * sizeof(*words));
  };
  std::fill(done.slots + begin, done.slots + end, static_cast<int32_t>(capacity));
  clear(done.keys, 2);
  clear(done.old_keys, 2);
  clear(done.old_scores, 2);
  clear(done.old_touched, 1);
}

class Insertion : public Pass {
 public:
  Insertion(const HashEntry& entry, int64_t tasks)
      : entry_(entry),
        stamp_{entry.asked.policy, static_cast<uint32_t>(*entry.asked.now), *entry.asked.epoch},
        parts_((entry.asked.batch.n + kTogether - 1) / kTogether),
        tasks_(std::clamp<int64_t>(tasks, 1, std::min<int64_t>(1 + parts_ / 4, 1 << 16))),
        placement_(entry_, stamp_) {}

  std::string_view table() const override { return {}; }
  void Request(int, Workspace& workspace) override {
    workspace.Request(&seen_, tasks_);
    placement_.Request(workspace);
  }
  Status Plan() override { return {}; }
  std::vector<TaskSet> Rounds() override {
    return {{tasks_, [this](int64_t task, int) { Touch(task); }}, {1, [this](int64_t, int) { Place(); }}};
  }
  Status Finish() override { return CheckKeys(entry_.check, entry_.done.counts[kHashRefused]); }

 private:
  // Each task looks at all positions, of which it takes its own.
  void Touch(int64_t task) {
    const HashBatch& batch = entry_.asked.batch;
    const int64_t n = batch.n;
    ClearInsertion(entry_.done, task * n / tasks_, (task + 1) * n / tasks_, entry_.directory.capacity());
    Seen own;
    Picked picked;
    const auto tasks = static_cast<uint32_t>(tasks_);
    // Tasks begin in different places: one does not wait for cache lines of `found` that another writes to.
    const int64_t start = task * parts_ / tasks_;
    for (int64_t k = 0; k < parts_; ++k) {
      const int64_t begin = (start + k) % parts_ * kTogether;
      picked.Pick(batch, begin, std::min(n, begin + kTogether),
                  [&](int64_t i) { return TaskOf(batch.keys + 2 * i, tasks) == task; });
      picked.Find(entry_.directory, entry_.done.found);
      TouchHits(entry_.directory, picked, entry_.asked.given, stamp_, &own);
    }
    seen_[task] = own;
  }

  void Place() {
    const HashInsertion& done = entry_.done;
    const Seen total = Total(seen_, tasks_);
    const auto placed = placement_.Place(total.misses);
    const int64_t counts[kHashCounts] = {total.requests,
                                         total.requests - total.misses,
                                         placed.distinct + total.unique_hits,
                                         total.unique_hits,
                                         placed.inserted,
                                         placed.evicted,
                                         placed.distinct - placed.inserted};
    for (int k = 0; k < kHashCounts; ++k) done.counts[k] = static_cast<int32_t>(counts[k]);
    if (placed.inserted == 0) return;
    const HashBatch& batch = entry_.asked.batch;
    Picked missed;
    for (int64_t begin = 0; begin < batch.n; begin += kTogether) {
      missed.Pick(batch, begin, std::min(batch.n, begin + kTogether),
                  [&](int64_t i) { return batch.present[i] && done.found[i] < 0; });
      missed.Find(entry_.directory, done.found);
    }
  }

  const HashEntry entry_;
  const HashStamp stamp_;
  const int64_t parts_, tasks_;
  Seen* seen_ = nullptr;
  HashPlacement placement_;
};

}  // namespace

std::unique_ptr<Pass> HashInsert(const HashEntry& entry, int64_t tasks) {
  return std::make_unique<Insertion>(entry, tasks);
}

}  // namespace jax_tt
