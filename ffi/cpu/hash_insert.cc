#include <string.h>

#include <algorithm>

#include "ffi/cpu/hash.h"
#include "ffi/cpu/hash_place.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {
namespace {

constexpr int64_t kBlock = 1024;

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

// Updates the scores of the requested keys whose slots are in [first, last); no other task writes to these.
int64_t TouchHits(const HashDirectory& directory, const int32_t* slots, int64_t n, const uint32_t* given,
                  const HashStamp& stamp, int64_t first, int64_t last) {
  constexpr int64_t kTogether = 256;
  const bool custom = stamp.policy == HashPolicy::kCustom;
  const auto now = static_cast<int32_t>(stamp.now);
  const uint32_t ways = static_cast<uint32_t>(directory.ways);
  int64_t unique = 0;
  struct {
    int32_t position;
    int64_t high_at;
  } own[kTogether + 1];
  for (int64_t begin = 0; begin < n; begin += kTogether) {
    const int64_t end = std::min(n, begin + kTogether);
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) {
      own[count].position = static_cast<int32_t>(i);
      count += slots[i] >= first && slots[i] < last;
    }
    for (int64_t k = 0; k < count; ++k) {
      const auto slot = static_cast<uint32_t>(slots[own[k].position]);
      own[k].high_at = slot + static_cast<int64_t>(slot / ways) * ways;
      __builtin_prefetch(directory.touched + slot, 1);
      __builtin_prefetch(directory.scores + own[k].high_at, 1);
      __builtin_prefetch(directory.scores + own[k].high_at + ways, 1);
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t i = own[k].position;
      int32_t* const touched = directory.touched + slots[i];
      uint32_t *const high = directory.scores + own[k].high_at, *const low = high + ways;
      const bool again = *touched == now;
      const uint64_t before = HashWord(*high, *low);
      uint64_t of_batch = custom ? HashWord(given, i) : 0;
      if (again) of_batch = std::max(of_batch, before);
      const uint64_t score = HashScore(before, 1, of_batch, stamp);
      *high = static_cast<uint32_t>(score >> 32);
      *low = static_cast<uint32_t>(score);
      *touched = now;
      unique += !again;
    }
  }
  return unique;
}

}  // namespace

Status HashInsert(const HashDirectory& directory, const HashBatch& batch, const uint32_t* given, const HashStamp& stamp,
                  int64_t min_age, const Pool& pool, const HashInsertion& done) {
  const HashKernels& kernels = GetHashKernels();
  const int64_t n = batch.n, blocks = (n + kBlock - 1) / kBlock, capacity = directory.capacity();
  // Tasks that each update the sets of one range, and look at the whole batch for that.
  const int64_t tasks = std::clamp<int64_t>(pool.workers, 1, std::min(directory.sets, 1 + blocks / 4));
  Seen *found = nullptr, *touched = nullptr;
  Workspace workspace;
  workspace.Request(&found, blocks);
  workspace.Request(&touched, tasks);
  JAX_TT_RETURN_IF_ERROR(workspace.Allocate());

  int32_t* const slots = done.slots;  // until the inserted ones are known, those of the batch
  HashPlacement placement(directory, batch, given, stamp, min_age);
  Status status;
  Phases phases;
  phases.Add(blocks, [&](int64_t block, int) {
    const int64_t begin = block * kBlock, end = std::min(n, begin + kBlock);
    kernels.find(directory, batch.keys + 2 * begin, batch.present + begin, end - begin, slots + begin);
    Seen seen;
    for (int64_t i = begin; i < end; ++i) {
      seen.requests += batch.present[i];
      seen.misses += batch.present[i] && slots[i] < 0;
    }
    found[block] = seen;
  });
  // The new keys are gathered before anything is changed, since this may run out of memory.
  phases.Add(1, [&](int64_t, int) { status = placement.Gather(slots, Total(found, blocks).misses); });
  phases.Add(tasks, [&](int64_t task, int) {
    touched[task] = {};
    if (!status.ok()) return;
    const auto start = [&](int64_t k) { return k * directory.sets / tasks * directory.ways; };
    touched[task].unique_hits = TouchHits(directory, slots, n, given, stamp, start(task), start(task + 1));
  });
  phases.Add(blocks, [&](int64_t block, int) {
    const int64_t begin = block * kBlock, count = std::min(n - begin, kBlock);
    const auto clear = [=](auto* words, int64_t width) {
      memset(words + width * begin, 0, static_cast<size_t>(width * count) * sizeof(*words));
    };
    std::fill_n(slots + begin, count, static_cast<int32_t>(capacity));
    clear(done.keys, 2);
    clear(done.old_keys, 2);
    clear(done.old_scores, 2);
    clear(done.old_touched, 1);
  });
  pool.Run(phases);
  JAX_TT_RETURN_IF_ERROR(status);

  const Seen seen = Total(found, blocks);
  const int64_t unique_hits = Total(touched, tasks).unique_hits;
  const auto placed = placement.Place(done);
  const int64_t counts[kHashCounts] = {
      seen.requests,  seen.requests - seen.misses,      placed.distinct + unique_hits, unique_hits, placed.inserted,
      placed.evicted, placed.distinct - placed.inserted};
  for (int k = 0; k < kHashCounts; ++k) done.counts[k] = static_cast<int32_t>(counts[k]);
  return {};
}

}  // namespace jax_tt
