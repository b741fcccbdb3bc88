// One bucket of ghosts that a batch adds to: who stays, and where newcomers go.
#pragma once

#include <stdint.h>

#include "ffi/cuda/cache/batch.h"
#include "ffi/cuda/lanes.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// What competes for the room of a bucket: a ghost or a newcomer; or nothing, which has a negative id.
template <typename K>
struct Contender {
  K tag = -1;
  int32_t score = 0;

  __device__ __forceinline__ bool exists() const { return tag >= 0; }
  __device__ __forceinline__ bool Before(const Contender& other) const {
    return CacheStaysBefore(score, tag, other.score, other.tag);
  }
};

// A warp sees to a bucket; every lane must call what says so ("all lanes").
template <typename K>
class Bucket {
 public:
  // number: of the bucket among the touched ones.
  __device__ __forceinline__ Bucket(const CacheBatch<K>& batch, int64_t number, int32_t now, int32_t stamp)
      : batch_(batch),
        ghosts_(batch.directory),
        number_(number),
        bucket_(batch.touched[number]),
        first_(bucket_ * batch.directory.shape.room),
        room_(static_cast<unsigned>(batch.directory.shape.room)),
        now_(now),
        stamp_(stamp),
        lane_(threadIdx.x % 32) {}

  // All lanes.
  __device__ void Settle() {
    const unsigned newcomers = static_cast<unsigned>(batch_.newcomers.sizes[bucket_]);
    int64_t list = number_;
    if (newcomers > 1) {
      const int32_t listed = lane_ == 0 ? atomicAdd(batch_.words + kListed, static_cast<int32_t>(newcomers)) : 0;
      list = batch_.n + __shfl_sync(kAllLanes, listed, 0);
    }
    tags_ = batch_.fresh_tags + list;
    counts_ = batch_.fresh_counts + list;
    places_ = batch_.free_places + list;
    for (unsigned first = 0; first < newcomers; first += 32) Meet(first, newcomers);
    __syncwarp();
    FindLimit();
    KeepFresh();
    KeepGhosts();
    __syncwarp();
    Seat();
  }

 private:
  // Up to 32 newcomers: those that are ghosts already feed them, the others are listed.  All lanes.
  __device__ __forceinline__ void Meet(unsigned first, unsigned newcomers) {
    const bool mine = first + lane_ < newcomers;
    K key = -1;
    int32_t count = 0;
    if (mine) {
      const unsigned entry = batch_.FindNewcomer(bucket_, static_cast<int32_t>(first + lane_));
      key = CacheBatch<K>::KeyOf(batch_.items.items[entry]);
      count = batch_.requests[entry];
    }
    int32_t place = -1;
    for (unsigned some = 0; some < room_; some += 32) {
      const K ghost = some + lane_ < room_ ? ghosts_.ghost_tags[first_ + some + lane_] : K{-1};
      for (unsigned j = 0; j < min(32u, newcomers - first); ++j) {
        const unsigned same = __ballot_sync(kAllLanes, ghost == __shfl_sync(kAllLanes, key, static_cast<int>(j)));
        if (lane_ == j && place < 0 && same != 0)
          place = static_cast<int32_t>(some) + __ffs(static_cast<int>(same)) - 1;
      }
    }
    if (place >= 0) {
      const int64_t at = first_ + place;
      ghosts_.ghost_scores[at] = CacheScore(ghosts_.ghost_scores[at], count, stamp_, batch_.policy);
      ghosts_.ghost_touched[at] = now_;
      ghosts_.ghost_recent[at] = count;
    }
    const bool fresh = mine && place < 0;
    const unsigned all_fresh = __ballot_sync(kAllLanes, fresh);
    if (fresh) {
      const unsigned at = fresh_ + Below(all_fresh);
      tags_[at] = key;
      counts_[at] = count;
    }
    fresh_ += __popc(all_fresh);
  }

  // Sets `limit_` to the first contender beyond the room, if there is one.  All lanes.
  __device__ __forceinline__ void FindLimit() {
    int64_t beyond = static_cast<int64_t>(fresh_) - room_;
    for (unsigned some = 0; some < room_; some += 32)
      beyond +=
          __popc(__ballot_sync(kAllLanes, some + lane_ < room_ && ghosts_.ghost_tags[first_ + some + lane_] >= 0));
    if (beyond <= 0) return;
    // It is met from either end; usually few are beyond.
    limit_ = beyond <= room_
                 ? Nth(static_cast<unsigned>(beyond), [](const auto& a, const auto& b) { return b.Before(a); })
                 : Nth(room_ + 1, [](const auto& a, const auto& b) { return a.Before(b); });
  }

  // The n-th of all contenders; before(a, b): their order.  All lanes.
  template <typename Before>
  __device__ __forceinline__ Contender<K> Nth(unsigned n, Before before) const {
    const auto earlier = [&](const Contender<K>& a, const Contender<K>& b) {
      return !b.exists() || (a.exists() && before(a, b)) ? a : b;
    };
    Contender<K> last;
    for (; n > 0; --n) {
      Contender<K> next;
      const auto consider = [&](const Contender<K>& one) {
        if (one.exists() && (!last.exists() || before(last, one))) next = earlier(next, one);
      };
      for (unsigned i = lane_; i < room_; i += 32) consider(Ghost(i));
      for (unsigned i = lane_; i < fresh_; i += 32) consider(Fresh(i));
      for (int step = 16; step > 0; step /= 2)
        next =
            earlier(next, {__shfl_xor_sync(kAllLanes, next.tag, step), __shfl_xor_sync(kAllLanes, next.score, step)});
      // Only where an id stands twice in a bucket, as it never should, are there fewer than were counted.
      if (!next.exists()) break;
      last = next;
    }
    return last;
  }

  __device__ __forceinline__ Contender<K> Ghost(unsigned i) const {
    return {ghosts_.ghost_tags[first_ + i], ghosts_.ghost_scores[first_ + i]};
  }
  __device__ __forceinline__ Contender<K> Fresh(unsigned i) const {
    return {tags_[i], CacheScore(0, counts_[i], stamp_, batch_.policy)};
  }

  // What LFU takes from every score.
  __device__ __forceinline__ int32_t Cut() const {
    return batch_.policy == CachePolicy::kLfu && limit_.exists() ? max(limit_.score, 0) : 0;
  }
  __device__ __forceinline__ bool Stays(const Contender<K>& one) const {
    if (!one.exists()) return false;
    if (batch_.policy == CachePolicy::kLfu) return CacheAged(one.score, Cut()) > 0;
    return !limit_.exists() || one.Before(limit_);
  }

  // Moves the newcomers that stay to the front of the list.  All lanes.
  __device__ __forceinline__ void KeepFresh() {
    unsigned kept = 0;
    for (unsigned first = 0; first < fresh_; first += 32) {
      const bool mine = first + lane_ < fresh_;
      const K tag = mine ? tags_[first + lane_] : K{-1};
      const int32_t count = mine ? counts_[first + lane_] : 0;
      const bool stays = mine && Stays(Fresh(first + lane_));
      const unsigned all_stay = __ballot_sync(kAllLanes, stays);
      __syncwarp();
      if (stays) {
        tags_[kept + Below(all_stay)] = tag;
        counts_[kept + Below(all_stay)] = count;
      }
      kept += __popc(all_stay);
    }
    fresh_ = kept;
  }

  // Ages or empties the places, and lists those that newcomers take.  All lanes.
  __device__ __forceinline__ void KeepGhosts() {
    for (unsigned some = 0; some < room_; some += 32) {
      const unsigned place = some + lane_;
      const Contender<K> ghost = place < room_ ? Ghost(place) : Contender<K>{};
      const bool stays = Stays(ghost);
      if (stays && Cut() > 0) ghosts_.ghost_scores[first_ + place] = CacheAged(ghost.score, Cut());
      const bool is_free = place < room_ && !stays;
      const unsigned all_free = __ballot_sync(kAllLanes, is_free);
      if (is_free) {
        const unsigned index = free_ + Below(all_free);
        if (index < fresh_)
          places_[index] = static_cast<int32_t>(place);
        else if (ghost.exists())
          Set(place, -1, 0, 0, 0);
      }
      free_ += __popc(all_free);
    }
  }

  // Newcomers by id to the free places in their order.  All lanes.
  __device__ __forceinline__ void Seat() const {
    for (unsigned i = lane_; i < fresh_; i += 32) {
      const K tag = tags_[i];
      unsigned rank = 0;
      for (unsigned j = 0; j < fresh_; ++j) rank += tags_[j] < tag;
      if (rank < free_)
        Set(static_cast<unsigned>(places_[rank]), tag, CacheAged(Fresh(i).score, Cut()), now_, counts_[i]);
    }
  }

  __device__ __forceinline__ void Set(unsigned place, K tag, int32_t score, int32_t touched, int32_t recent) const {
    ghosts_.ghost_tags[first_ + place] = tag;
    ghosts_.ghost_scores[first_ + place] = score;
    ghosts_.ghost_touched[first_ + place] = touched;
    ghosts_.ghost_recent[first_ + place] = recent;
  }

  // How many of these lanes are below this one.
  __device__ __forceinline__ unsigned Below(unsigned lanes) const {
    return static_cast<unsigned>(__popc(lanes & ((1u << lane_) - 1)));
  }

  const CacheBatch<K>& batch_;
  const CacheDirectory<K>& ghosts_;
  const int64_t number_;
  const int32_t bucket_;
  const int64_t first_;
  const unsigned room_;
  const int32_t now_, stamp_;
  const unsigned lane_;

  K* tags_ = nullptr;          // of the newcomers that are no ghosts yet
  int32_t* counts_ = nullptr;  // their requests
  int32_t* places_ = nullptr;  // free places for them
  unsigned fresh_ = 0;         // how many they are
  unsigned free_ = 0;          // places that are free
  Contender<K> limit_;
};

}  // namespace jax_tt
