#include <algorithm>
#include <cstdint>

#include "ffi/cpu/cache/cache.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {
namespace {

template <typename K>
struct Ghost {
  int32_t score, touched;
  K tag;
  int32_t place;
};
struct Slot {
  CacheSlotRank rank;
  int32_t way;
};

// Counts and buffers of one worker.
template <typename K>
struct Worker {
  int64_t counts[kCacheCounts] = {};
  Ghost<K>* ghosts = nullptr;  // [ghosts_per_set]
  Slot* slots = nullptr;       // [ways]
};

// One set.
template <typename K>
class Set {
 public:
  Set(const CacheDirectory<K>& directory, int64_t set, K* evicted)
      : shape_(directory.shape),
        now_(*directory.clock),
        ways_(directory.shape.ways),
        room_(directory.shape.ghosts_per_set()) {
    const int64_t slot = set * ways_, ghost = set * room_;
    tags_ = directory.tags + slot;
    scores_ = directory.scores + slot;
    touched_ = directory.touched + slot;
    evicted_ = evicted + slot;
    ghost_tags_ = directory.ghost_tags + ghost;
    ghost_scores_ = directory.ghost_scores + ghost;
    ghost_touched_ = directory.ghost_touched + ghost;
    ghost_recent_ = directory.ghost_recent + ghost;
  }

  void Populate(Worker<K>* worker) const {
    std::fill_n(evicted_, ways_, K{-1});
    CacheSlotRank coldest = Rank(0);
    for (int64_t way = 1; way < ways_; ++way) coldest = std::min(coldest, Rank(way));
    if (!coldest.locked) {
      // A ghost can take a slot only if it can take the coldest one; an empty slot accepts any ghost.
      const int32_t score = coldest.held ? coldest.score : INT32_MIN;
      const int32_t touched = coldest.held ? coldest.touched : INT32_MIN;
      if (AnyHotter(score, touched)) Trade(score, touched, worker);
    }
    CountOutside(worker->counts);
  }

 private:
  CacheSlotRank Rank(int64_t way) const { return RankCacheSlot(tags_[way], scores_[way], touched_[way], now_); }

  bool AnyHotter(int32_t score, int32_t touched) const {
    int32_t any = 0;
    for (int64_t g = 0; g < room_; ++g)
      any |= static_cast<int32_t>(ghost_tags_[g] >= 0) &
             (static_cast<int32_t>(ghost_scores_[g] > score) |
              (static_cast<int32_t>(ghost_scores_[g] == score) & static_cast<int32_t>(ghost_touched_[g] > touched)));
    return any != 0;
  }

  void Trade(int32_t score, int32_t touched, Worker<K>* worker) const {
    Ghost<K>* const ghosts = worker->ghosts;
    int64_t candidates = 0;
    for (int64_t g = 0; g < room_; ++g)
      if (ghost_tags_[g] >= 0 && CacheIsHotter(ghost_scores_[g], ghost_touched_[g], score, touched))
        ghosts[candidates++] = {ghost_scores_[g], ghost_touched_[g], ghost_tags_[g], static_cast<int32_t>(g)};
    const int64_t pairs = std::min(ways_, candidates);
    std::partial_sort(ghosts, ghosts + pairs, ghosts + candidates, [](const Ghost<K>& a, const Ghost<K>& b) {
      return CacheEntersBefore(a.score, a.touched, a.tag, b.score, b.touched, b.tag);
    });
    Slot* const slots = worker->slots;
    for (int64_t way = 0; way < ways_; ++way) slots[way] = {Rank(way), static_cast<int32_t>(way)};
    std::partial_sort(slots, slots + pairs, slots + ways_, [](const Slot& a, const Slot& b) {
      return a.rank < b.rank || (!(b.rank < a.rank) && a.way < b.way);
    });
    int64_t left = 0;  // evicted rows, which overwrite the inserted ghosts
    for (int64_t i = 0; i < pairs && Takes(ghosts[i], slots[i].rank); ++i) {
      const int32_t way = slots[i].way, place = ghosts[i].place;
      const Ghost<K> row = {scores_[way], touched_[way], tags_[way], -1};
      ++worker->counts[kCacheInserted];
      worker->counts[kCacheEvicted] += row.tag >= 0;
      evicted_[way] = row.tag;
      tags_[way] = ghost_tags_[place];
      scores_[way] = ghost_scores_[place];
      touched_[way] = ghost_touched_[place];
      SetGhost(place, -1, 0, 0);
      if (row.tag >= 0) ghosts[left++] = row;
    }
    // Only now, when the entries of all inserted ghosts are empty.
    for (int64_t i = 0; i < left; ++i) Count(ghosts[i]);
  }

  // Makes an evicted row a ghost of its bucket, if there is room or a lower-ranked ghost.
  void Count(const Ghost<K>& row) const {
    int64_t last = CacheBucketInSet(CacheHash(row.tag), shape_) * shape_.room;
    const int64_t end = last + shape_.room;
    for (int64_t g = last; g < end && ghost_tags_[last] >= 0; ++g)
      if (ghost_tags_[g] < 0 ||
          CacheStaysBefore(ghost_scores_[last], ghost_tags_[last], ghost_scores_[g], ghost_tags_[g]))
        last = g;
    if (ghost_tags_[last] < 0 || CacheStaysBefore(row.score, row.tag, ghost_scores_[last], ghost_tags_[last]))
      SetGhost(last, row.tag, row.score, row.touched);
  }

  void SetGhost(int64_t place, K tag, int32_t score, int32_t touched) const {
    ghost_tags_[place] = tag;
    ghost_scores_[place] = score;
    ghost_touched_[place] = touched;
    ghost_recent_[place] = 0;
  }

  static bool Takes(const Ghost<K>& ghost, const CacheSlotRank& slot) {
    return !slot.locked && (!slot.held || CacheIsHotter(ghost.score, ghost.touched, slot.score, slot.touched));
  }

  // Counts ghosts touched in this step, and their requests; evicted rows were not touched in this step.
  void CountOutside(int64_t* counts) const {
    int32_t outside = 0;
    for (int64_t g = 0; g < room_; ++g)
      outside += static_cast<int32_t>(ghost_touched_[g] == now_) & static_cast<int32_t>(ghost_tags_[g] >= 0);
    counts[kCacheOutside] += outside;
    if (outside == 0) return;  // saves reading the fourth array
    for (int64_t g = 0; g < room_; ++g)
      counts[kCacheOutsideRequests] += ghost_touched_[g] == now_ && ghost_tags_[g] >= 0 ? ghost_recent_[g] : 0;
  }

  const CacheShape shape_;
  const int32_t now_;
  const int64_t ways_, room_;
  K *tags_, *evicted_, *ghost_tags_;
  int32_t *scores_, *touched_, *ghost_scores_, *ghost_touched_, *ghost_recent_;
};

}  // namespace

template <typename K>
Status CachePopulate(const CacheDirectory<K>& directory, const Pool& pool, K* evicted, int32_t* counts) {
  constexpr int64_t kBlock = 16;
  std::vector<Worker<K>> workers(static_cast<size_t>(pool.workers));
  Workspace workspace;
  for (Worker<K>& worker : workers) {
    workspace.Request(&worker.ghosts, directory.shape.ghosts_per_set());
    workspace.Request(&worker.slots, directory.shape.ways);
  }
  JAX_TT_RETURN_IF_ERROR(workspace.Allocate());
  Phases phases;
  phases.AddBlocks(directory.shape.sets, kBlock, [&](int64_t set, int64_t end, int worker) {
    Worker<K> mine = workers[static_cast<size_t>(worker)];  // a copy, to avoid false sharing of the counts
    for (; set < end; ++set) Set<K>(directory, set, evicted).Populate(&mine);
    workers[static_cast<size_t>(worker)] = mine;
  });
  pool.Run(phases);
  for (int count = 0; count < kCacheCounts; ++count) {
    int64_t sum = 0;
    for (const Worker<K>& worker : workers) sum += worker.counts[count];
    counts[count] = static_cast<int32_t>(sum);
  }
  return {};
}

template Status CachePopulate(const CacheDirectory<int32_t>&, const Pool&, int32_t*, int32_t*);
template Status CachePopulate(const CacheDirectory<int64_t>&, const Pool&, int64_t*, int32_t*);

}  // namespace jax_tt
