// A bucket of ghosts: counting requests for those it has, and choosing who of them and of the newcomers has a place.
#ifndef JAX_TT_CPU_CACHE_BUCKET_H_
#define JAX_TT_CPU_CACHE_BUCKET_H_

#include <stdint.h>

#include <algorithm>
#include <limits>

#include "ffi/cpu/cache.h"

namespace jax_tt {

// An id and how often this batch asks for it.
template <typename K>
struct CountedKey {
  int32_t count;
  K key;
};

// A ghost or newcomer among those of its bucket: who comes first stays.
template <typename K>
struct CacheRival {
  int32_t score;
  K tag;

  bool operator<(const CacheRival& other) const { return CacheStaysBefore(score, tag, other.score, other.tag); }
};

template <typename K>
class CacheBucket {
 public:
  CacheBucket(const CacheDirectory<K>& directory, CachePolicy policy, int64_t bucket)
      : policy_(policy), now_(*directory.clock), room_(directory.shape.room) {
    const int64_t place = bucket * room_;
    tags_ = directory.ghost_tags + place;
    scores_ = directory.ghost_scores + place;
    touched_ = directory.ghost_touched + place;
    recent_ = directory.ghost_recent + place;
  }

  // Asks for what every request reads.
  void Prefetch() const {
    constexpr int64_t kBytes = 256;
    PrefetchCacheLines(tags_, std::min(room_ * static_cast<int64_t>(sizeof(K)), kBytes));
    PrefetchCacheLines(scores_, std::min(room_ * static_cast<int64_t>(sizeof(int32_t)), kBytes));
  }

  // Counts the requests for a ghost; false where the id is none.
  bool Feed(const CountedKey<K>& asked) const {
    const int64_t place = FindCacheTag(tags_, room_, asked.key);
    if (place == room_) return false;
    Put(place, {asked.count, asked.key}, scores_[place], 0);
    return true;
  }

  // Lets in `count` > 0 distinct ids that are no ghosts, in ascending order.  `rivals` has room for room + 1.
  void Admit(const CountedKey<K>* news, int64_t count, CacheRival<K>* rivals) const {
    CacheRival<K> beyond = {std::numeric_limits<int32_t>::min(), std::numeric_limits<K>::max()};  // after all others
    const bool crowded = FirstBeyond(news, count, rivals, &beyond);
    const bool ages = crowded && policy_ == CachePolicy::kLfu;
    const int32_t cut = ages ? std::max(beyond.score, 0) : 0;
    if (crowded && (ages ? Age(cut) : Drop(beyond))) ClearEmpty();
    int64_t place = 0;
    for (int64_t i = 0; i < count; ++i) {
      const CacheRival<K> newcomer = Newcomer(news[i]);
      const bool stays = ages ? CacheAged(newcomer.score, cut) > 0 : newcomer < beyond;
      if (!stays) continue;
      while (place < room_ && tags_[place] >= 0) ++place;
      if (place == room_) return;  // only in a corrupt bucket, which may hold an id twice
      Put(place, news[i], 0, cut);
    }
  }

 private:
  void Put(int64_t place, const CountedKey<K>& asked, int32_t score, int32_t cut) const {
    tags_[place] = asked.key;
    scores_[place] = CacheAged(CacheScore(score, asked.count, now_, policy_), cut);
    touched_[place] = now_;
    recent_[place] = asked.count;
  }

  CacheRival<K> Newcomer(const CountedKey<K>& asked) const {
    return {CacheScore(0, asked.count, now_, policy_), asked.key};
  }

  // The first of ghosts and newcomers for whom there is no room; false where there is for all.
  bool FirstBeyond(const CountedKey<K>* news, int64_t count, CacheRival<K>* rivals, CacheRival<K>* beyond) const {
    int64_t held = 0;
    for (int64_t place = 0; place < room_; ++place) held += tags_[place] >= 0;
    const int64_t excess = held + count - room_;
    if (excess <= 0) return false;
    if (excess == 1) {
      *beyond = LastGhost();
      for (int64_t i = 0; i < count; ++i) *beyond = std::max(*beyond, Newcomer(news[i]));
      return true;
    }
    // The first room + 1 so far, with the last of them on top.
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
    *beyond = rivals[0];
    return true;
  }

  CacheRival<K> LastGhost() const {
    constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
    int32_t score = kMax;
    for (int64_t place = 0; place < room_; ++place) score = std::min(score, tags_[place] >= 0 ? scores_[place] : kMax);
    K tag = -1;
    for (int64_t place = 0; place < room_; ++place) tag = std::max(tag, scores_[place] == score ? tags_[place] : K{-1});
    return {score, tag};
  }

  // Takes `cut` from every score and empties the places of those who have nothing left; whether there were any.
  bool Age(int32_t cut) const {
    K* __restrict tags = tags_;
    int32_t* __restrict scores = scores_;
    int32_t emptied = 0;
    for (int64_t place = 0; place < room_; ++place) {
      const int32_t aged = CacheAged(scores[place], cut);
      scores[place] = aged;
      emptied |= static_cast<int32_t>(aged <= 0);
      tags[place] = aged > 0 ? tags[place] : K{-1};
    }
    return emptied != 0;
  }

  // Empties the places of those who have none before `beyond`; whether there were any.
  bool Drop(const CacheRival<K>& beyond) const {
    K* __restrict tags = tags_;
    const int32_t* __restrict scores = scores_;
    int32_t emptied = 0;
    for (int64_t place = 0; place < room_; ++place) {
      const int32_t stays =
          static_cast<int32_t>(scores[place] > beyond.score) |
          (static_cast<int32_t>(scores[place] == beyond.score) & static_cast<int32_t>(tags[place] < beyond.tag));
      emptied |= stays ^ 1;
      tags[place] = stays ? tags[place] : K{-1};
    }
    return emptied != 0;
  }

  void ClearEmpty() const {
    for (int64_t place = 0; place < room_; ++place)
      if (tags_[place] < 0) {
        tags_[place] = -1;
        scores_[place] = touched_[place] = recent_[place] = 0;
      }
  }

  const CachePolicy policy_;
  const int32_t now_;
  const int64_t room_;
  K* tags_;
  int32_t *scores_, *touched_, *recent_;
};

}  // namespace jax_tt

#endif  // JAX_TT_CPU_CACHE_BUCKET_H_
