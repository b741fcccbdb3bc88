// Sets of a hash table as the lanes of a warp look at them, several keys at a time.
#pragma once

#include <stdint.h>

#include "ffi/core/hash.h"
#include "ffi/cuda/lanes.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

// The lanes that see to one key.  Every lane of the warp must call Find and Occupied.
class HashLanes {
 public:
  static constexpr int kLanes = 8;

  __device__ __forceinline__ HashLanes(const HashDirectory& directory, const HashSets& sets)
      : directory_(directory), sets_(sets), lane_(threadIdx.x % kLanes), first_lane_(threadIdx.x % 32 - lane_) {}

  __device__ __forceinline__ bool leads() const { return lane_ == 0; }

  // The slot of a key, or -1; also where it is not wanted.
  __device__ __forceinline__ int32_t Find(uint64_t key, bool wanted) const {
    const auto high = static_cast<uint32_t>(key >> 32), low = static_cast<uint32_t>(key);
    const int32_t slot = FindInSet(sets_.Of(FirstHash(high, low)), key, wanted);
    const int32_t other = FindInSet(sets_.Of(SecondHash(high, low)), key, wanted && slot < 0);
    return slot < 0 ? other : slot;
  }

  // How many keys a set has, where it is wanted.
  __device__ __forceinline__ int Occupied(int64_t set, bool wanted) const {
    return __popcll(Ways(
        wanted, [&](int64_t way) { return directory_.touched[set * directory_.ways + way]; },
        [](int32_t touched, int64_t) { return touched > 0; }));
  }

 private:
  __device__ __forceinline__ int32_t FindInSet(int64_t set, uint64_t key, bool wanted) const {
    const unsigned long long ways = Ways(
        wanted, [&](int64_t way) { return directory_.WordOf(directory_.keys, set, way); },
        [&](uint64_t word, int64_t way) {
          if (word != key) return false;
          return key != 0 || directory_.touched[set * directory_.ways + way] > 0;  // empty slots are 0
        });
    return ways == 0 ? -1 : static_cast<int32_t>(set * directory_.ways + __ffsll(static_cast<long long>(ways)) - 1);
  }

  // The ways for which test(load(way), way) holds, a bit each.  What is loaded of several ways is asked for before any
  // of it is looked at.
  template <typename Load, typename Test>
  __device__ __forceinline__ unsigned long long Ways(bool wanted, Load load, Test test) const {
    constexpr int kAhead = 4;
    const auto way_at = [&](int64_t first, int k) { return first + k * kLanes + lane_; };
    unsigned long long ways = 0;
    for (int64_t first = 0; first < directory_.ways; first += kAhead * kLanes) {
      decltype(load(first)) loaded[kAhead] = {};
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (wanted && way_at(first, k) < directory_.ways) loaded[k] = load(way_at(first, k));
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int64_t way = way_at(first, k);
        const unsigned all = __ballot_sync(kAllLanes, wanted && way < directory_.ways && test(loaded[k], way));
        ways |= static_cast<unsigned long long>(all >> first_lane_ & ((1u << kLanes) - 1)) << (first + k * kLanes);
      }
    }
    return ways;
  }

  const HashDirectory& directory_;
  const HashSets sets_;
  const int lane_, first_lane_;
};

}  // namespace jax_tt
