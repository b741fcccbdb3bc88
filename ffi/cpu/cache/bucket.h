// A bucket of ghosts: counts requests for its ghosts, and selects which ghosts and new ids it keeps.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <limits>

#include "ffi/cpu/cache/cache.h"
#include "ffi/cpu/cache/masks.h"
#include "ffi/cpu/prefetch.h"

namespace jax_tt {

// An id and its number of requests in this batch.
template <typename K>
struct CountedKey {
  int32_t count;
  K key;
};

// A ghost or new id, in the order in which a bucket keeps them.
template <typename K>
struct CacheRival {
  int32_t score;
  K tag;

  bool operator<(const CacheRival& other) const { return CacheStaysBefore(score, tag, other.score, other.tag); }
};

// Step and number of the last requests for ghosts.  They are not read here, so writes are delayed until their cache
// lines, which are far apart, have been prefetched.
class CacheGhostTimes {
 public:
  CacheGhostTimes(int32_t* touched, int32_t* recent) : touched_(touched), recent_(recent) {}
  CacheGhostTimes(const CacheGhostTimes&) = delete;
  ~CacheGhostTimes() {
    for (uint32_t i = 0; i < kWaiting; ++i) WriteOldest();
  }

  void Write(int64_t place, int32_t touched, int32_t recent) {
    PrefetchLines(touched_ + place, 1);
    PrefetchLines(recent_ + place, 1);
    WriteOldest();
    waiting_[(oldest_ - 1) % kWaiting] = {place, touched, recent};
  }

 private:
  static constexpr uint32_t kWaiting = 16;
  struct Entry {
    int64_t place = -1;
    int32_t touched = 0, recent = 0;
  };

  void WriteOldest() {
    Entry& entry = waiting_[oldest_++ % kWaiting];
    if (entry.place < 0) return;
    touched_[entry.place] = entry.touched;
    recent_[entry.place] = entry.recent;
    entry.place = -1;
  }

  int32_t *touched_, *recent_;
  uint32_t oldest_ = 0;
  Entry waiting_[kWaiting];
};

// Buffers of one worker.
template <typename K>
struct CacheBucketWork {
  CacheGhostTimes times;
  CacheRival<K>* rivals;  // [room + 1]
};

template <typename K>
class CacheBucket {
 public:
  CacheBucket(const CacheDirectory<K>& directory, CachePolicy policy, int64_t bucket)
      : policy_(policy),
        now_(*directory.clock),
        stamp_(*directory.stamp),
        room_(directory.shape.room),
        first_(bucket * room_),
        tags_(directory.ghost_tags + first_),
        scores_(directory.ghost_scores + first_) {}

  // Prefetches the data that every request reads.
  void Prefetch() const {
    constexpr int64_t kBytes = 256;
    PrefetchLines(tags_, std::min(room_ * static_cast<int64_t>(sizeof(K)), kBytes));
    PrefetchLines(scores_, std::min(room_ * static_cast<int64_t>(sizeof(int32_t)), kBytes));
  }

  // Counts the requests for a ghost; false if the id is not a ghost.
  bool Feed(const CountedKey<K>& asked, CacheBucketWork<K>* work) const {
    const int64_t place = FindCacheTag(tags_, room_, asked.key);
    if (place == room_) return false;
    scores_[place] = CacheScore(scores_[place], asked.count, stamp_, policy_);
    work->times.Write(first_ + place, now_, asked.count);
    return true;
  }

  // Inserts `count` > 0 distinct ids that are not ghosts, in ascending order.
  void Admit(const CountedKey<K>* news, int64_t count, CacheBucketWork<K>* work) const {
    int64_t excess = count;
    for (int64_t base = 0; base < room_; base += kMaskPlaces) excess -= __builtin_popcountll(Empty(base));
    const CacheRival<K> beyond = excess <= 0      ? kNobody
                                 : excess <= kFew ? LastButFew(news, count, excess)
                                                  : Select(news, count, work->rivals);
    const bool ages = excess > 0 && policy_ == CachePolicy::kLfu;
    const int32_t cut = ages ? std::max(beyond.score, 0) : 0;
    const CountedKey<K>* const end = news + count;
    for (int64_t base = 0; base < room_; base += kMaskPlaces) {
      const uint64_t empty_before = Empty(base);
      if (excess > 0) ages ? Age(base, cut) : Drop(base, beyond);
      uint64_t empty = Empty(base);
      for (;; ++news) {
        while (news < end && !(ages ? CacheAged(Newcomer(*news).score, cut) > 0 : Newcomer(*news) < beyond)) ++news;
        if (news == end || empty == 0) break;
        const int64_t place = base + __builtin_ctzll(empty);
        empty &= empty - 1;
        tags_[place] = news->key;
        scores_[place] = CacheAged(Newcomer(*news).score, cut);
        work->times.Write(first_ + place, now_, news->count);
      }
      for (empty &= ~empty_before; empty != 0; empty &= empty - 1) {
        const int64_t place = base + __builtin_ctzll(empty);
        tags_[place] = -1;
        scores_[place] = 0;
        work->times.Write(first_ + place, 0, 0);
      }
    }
  }

 private:
  // Up to this excess, the first rejected entry is found by repeated scans; above, with a heap.
  static constexpr int64_t kFew = 8;

  static constexpr int32_t kMaxScore = std::numeric_limits<int32_t>::max();
  // Ranks after all others.
  static constexpr CacheRival<K> kNobody = {std::numeric_limits<int32_t>::min(), std::numeric_limits<K>::max()};

  int64_t Places(int64_t base) const { return std::min(room_ - base, kMaskPlaces); }
  uint64_t Empty(int64_t base) const { return EmptyMask(tags_ + base, Places(base)); }

  CacheRival<K> Newcomer(const CountedKey<K>& asked) const {
    return {CacheScore(0, asked.count, stamp_, policy_), asked.key};
  }

  // The entry of rank `room` among ghosts and new ids, found by `excess` scans from the last one.
  CacheRival<K> LastButFew(const CountedKey<K>* news, int64_t count, int64_t excess) const {
    CacheRival<K> last = kNobody;
    for (; excess > 0; --excess) last = LastBefore(last, news, count);
    return last;
  }

  CacheRival<K> LastBefore(const CacheRival<K>& limit, const CountedKey<K>* news, int64_t count) const {
    const auto before = [&](int64_t place) {
      return (tags_[place] >= 0) &
             ((scores_[place] > limit.score) | ((scores_[place] == limit.score) & (tags_[place] < limit.tag)));
    };
    int32_t score = kMaxScore;
    for (int64_t place = 0; place < room_; ++place) score = std::min(score, before(place) ? scores_[place] : kMaxScore);
    K tag = -1;
    for (int64_t place = 0; place < room_; ++place)
      tag = std::max(tag, before(place) & (scores_[place] == score) ? tags_[place] : K{-1});
    CacheRival<K> last = {score, tag};
    for (int64_t i = 0; i < count; ++i)
      if (const CacheRival<K> rival = Newcomer(news[i]); rival < limit && last < rival) last = rival;
    return last;
  }

  // The same entry, found as the top of a heap of the first room + 1 entries.
  CacheRival<K> Select(const CountedKey<K>* news, int64_t count, CacheRival<K>* rivals) const {
    int64_t size = 0;
    const auto add = [&](const CacheRival<K>& rival) {
      if (size == room_ + 1) {
        if (!(rival < rivals[0])) return;
        std::pop_heap(rivals, rivals + size--);
      }
      rivals[size++] = rival;
      std::push_heap(rivals, rivals + size);
    };
    for (int64_t place = 0; place < room_; ++place)
      if (tags_[place] >= 0) add({scores_[place], tags_[place]});
    for (int64_t i = 0; i < count; ++i) add(Newcomer(news[i]));
    return rivals[0];
  }

  // Subtracts `cut` from the scores of up to kMaskPlaces ghosts and drops those at zero.
  void Age(int64_t base, int32_t cut) const {
    K* __restrict tags = tags_ + base;
    int32_t* __restrict scores = scores_ + base;
    for (int64_t place = 0; place < Places(base); ++place) {
      const int32_t aged = CacheAged(scores[place], cut);
      const bool stays = (tags[place] >= 0) & (aged > 0);
      scores[place] = stays ? aged : 0;
      tags[place] = stays ? tags[place] : K{-1};
    }
  }

  // Drops those of up to kMaskPlaces ghosts that do not rank before `beyond`.
  void Drop(int64_t base, const CacheRival<K>& beyond) const {
    K* __restrict tags = tags_ + base;
    const int32_t* __restrict scores = scores_ + base;
    for (int64_t place = 0; place < Places(base); ++place) {
      const bool stays =
          (scores[place] > beyond.score) | ((scores[place] == beyond.score) & (tags[place] < beyond.tag));
      tags[place] = stays ? tags[place] : K{-1};
    }
  }

  const CachePolicy policy_;
  const int32_t now_, stamp_;
  const int64_t room_, first_;
  K* const tags_;
  int32_t* const scores_;
};

}  // namespace jax_tt
