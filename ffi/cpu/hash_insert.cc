#include <string.h>

#include <algorithm>

#include "ffi/cpu/hash.h"
#include "ffi/cpu/hash_place.h"
#include "ffi/cpu/prefetch.h"
#include "ffi/cpu/workspace.h"

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

// Updates the scores of the picked keys that have a slot.
void TouchHits(const HashDirectory& directory, const Picked& picked, const uint32_t* given, const HashStamp& stamp,
               Seen* seen) {
  const bool custom = stamp.policy == HashPolicy::kCustom;
  const auto now = static_cast<int32_t>(stamp.now);
  const auto high_of = [&](int64_t k) {
    const auto slot = static_cast<uint32_t>(std::max(picked.slots[k], 0)), ways = static_cast<uint32_t>(directory.ways);
    return directory.scores + slot + static_cast<int64_t>(slot / ways) * ways;
  };
  const auto fetch = [&](int64_t k) {
    PrefetchLines(directory.touched + std::max(picked.slots[k], 0), 1);
    PrefetchLines(high_of(k), 1);
    if (directory.ways > 8) PrefetchLines(high_of(k) + directory.ways, 1);  // else most often the same line
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
    uint32_t *const high = high_of(k), *const low = high + directory.ways;
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

// The results of a batch that inserts nothing, in [begin, end), but for `found`.
void ClearInsertion(const HashInsertion& done, int64_t begin, int64_t end, int64_t capacity) {
  const auto clear = [=](auto* words, int64_t width) {
    memset(words + width * begin, 0, static_cast<size_t>(width * (end - begin)) * sizeof(*words));
  };
  std::fill(done.slots + begin, done.slots + end, static_cast<int32_t>(capacity));
  clear(done.keys, 2);
  clear(done.old_keys, 2);
  clear(done.old_scores, 2);
  clear(done.old_touched, 1);
}

}  // namespace

Status HashInsert(const HashDirectory& directory, const HashBatch& batch, const uint32_t* given, const HashStamp& stamp,
                  int64_t min_age, const Pool& pool, const HashInsertion& done) {
  const int64_t n = batch.n, parts = (n + kTogether - 1) / kTogether;
  // Each looks at all positions, of which it takes its own.
  const int64_t tasks = std::clamp<int64_t>(pool.workers, 1, std::min<int64_t>(1 + parts / 4, 1 << 16));
  Seen* seen = nullptr;
  Workspace workspace;
  workspace.Request(&seen, tasks);
  JAX_TT_RETURN_IF_ERROR(workspace.Allocate());
  HashPlacement placement(directory, batch, given, stamp, min_age);
  JAX_TT_RETURN_IF_ERROR(placement.Reserve());  // before anything is changed

  Phases phases;
  phases.Add(tasks, [&](int64_t task, int) {
    ClearInsertion(done, task * n / tasks, (task + 1) * n / tasks, directory.capacity());
    Seen own;
    Picked picked;
    // Tasks begin in different places: one does not wait for cache lines of `found` that another writes to.
    const int64_t start = task * parts / tasks;
    for (int64_t k = 0; k < parts; ++k) {
      const int64_t begin = (start + k) % parts * kTogether;
      picked.Pick(batch, begin, std::min(n, begin + kTogether),
                  [&](int64_t i) { return TaskOf(batch.keys + 2 * i, static_cast<uint32_t>(tasks)) == task; });
      picked.Find(directory, done.found);
      TouchHits(directory, picked, given, stamp, &own);
    }
    seen[task] = own;
  });
  pool.Run(phases);

  const Seen total = Total(seen, tasks);
  const auto placed = placement.Place(total.misses, done);
  const int64_t counts[kHashCounts] = {total.requests,
                                       total.requests - total.misses,
                                       placed.distinct + total.unique_hits,
                                       total.unique_hits,
                                       placed.inserted,
                                       placed.evicted,
                                       placed.distinct - placed.inserted};
  for (int k = 0; k < kHashCounts; ++k) done.counts[k] = static_cast<int32_t>(counts[k]);
  if (placed.inserted == 0) return {};
  Picked missed;
  for (int64_t begin = 0; begin < n; begin += kTogether) {
    missed.Pick(batch, begin, std::min(n, begin + kTogether),
                [&](int64_t i) { return batch.present[i] && done.found[i] < 0; });
    missed.Find(directory, done.found);
  }
  return {};
}

}  // namespace jax_tt
