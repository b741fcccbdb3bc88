#include <algorithm>

#include "ffi/cuda/hash/batch.h"
#include "ffi/cuda/lanes.h"
#include "ffi/cuda/warp_reduce.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;
// A few times what fits on a large GPU at once; from there on a warp takes several parts of the table of sets.
constexpr int64_t kMaxBlocks = 2048;

// A new key, or none.
struct Comer {
  unsigned long long score, key;
  int32_t position = -1;

  __device__ __forceinline__ bool exists() const { return position >= 0; }
  __device__ __forceinline__ bool Before(const Comer& other) const {
    return HashEntersBefore(score, key, other.score, other.key);
  }
  __device__ __forceinline__ Comer OfLane(int step) const {
    return {__shfl_xor_sync(kAllLanes, score, step), __shfl_xor_sync(kAllLanes, key, step),
            __shfl_xor_sync(kAllLanes, position, step)};
  }
};

// A way that a new key may take, with the key that leaves it, or none.  Empty ways are 0, so that the first goes first.
struct Room {
  unsigned long long score, key;
  int32_t touched;
  int32_t way = -1;

  __device__ __forceinline__ bool exists() const { return way >= 0; }
  __device__ __forceinline__ bool Before(const Room& other) const {
    const HashLeaving mine{score, touched, key}, its{other.score, other.touched, other.key};
    return mine < its || (!(its < mine) && way < other.way);
  }
  __device__ __forceinline__ Room OfLane(int step) const {
    return {__shfl_xor_sync(kAllLanes, score, step), __shfl_xor_sync(kAllLanes, key, step),
            __shfl_xor_sync(kAllLanes, touched, step), __shfl_xor_sync(kAllLanes, way, step)};
  }
};

// A set that keys wait for, of one warp.  Lane l sees to the ways and to the keys l, l + 32, ...
struct Set {
  const HashInserting& batch;
  const HashWaiting& waiting;
  const bool evict;
  const int32_t entry, now;
  const int64_t set;
  const int32_t size;

  __device__ __forceinline__ Set(const HashInserting& batch, int side, bool evict, int32_t entry, int64_t set)
      : batch(batch),
        waiting(batch.waiting[side]),
        evict(evict),
        entry(entry),
        now(*batch.asked.now),
        set(set),
        size(waiting.keys.sizes[entry]) {}

  // Calls see(key) for every key of this lane.
  template <typename See>
  __device__ __forceinline__ void ForKeys(See see) const {
    for (int32_t rank = threadIdx.x % 32; rank < size; rank += 32) see(waiting.Find(entry, rank));
  }
  __device__ __forceinline__ bool IsPlaced(int32_t key) const { return batch.slots[key] < batch.directory.capacity(); }

  // The first of this lane's keys behind `last` (of all of them, where that is none).
  __device__ __forceinline__ Comer NextComer(const Comer& last) const {
    Comer next{};
    ForKeys([&](int32_t key) {
      const Comer comer{batch.scores[key], batch.KeyOf(key), key};
      if ((!last.exists() || last.Before(comer)) && !IsPlaced(key)) next = Earlier(next, comer);
    });
    return next;
  }

  // The first of this lane's ways that may be taken.
  __device__ __forceinline__ Room NextRoom() const {
    const HashDirectory& directory = batch.directory;
    Room next{};
    for (int32_t way = threadIdx.x % 32; way < directory.ways; way += 32) {
      const int32_t touched = directory.touched[set * directory.ways + way];
      if (evict != (touched > 0) || (evict && touched > now - batch.asked.min_age)) continue;
      Room room{0, 0, 0, way};
      if (evict) {
        room.score = directory.WordOf(directory.scores, set, way);
        room.key = directory.WordOf(directory.keys, set, way);
        room.touched = touched;
      }
      next = Earlier(next, room);
    }
    return next;
  }

  __device__ __forceinline__ void Put(const Comer& comer, const Room& room) const {
    const HashDirectory& directory = batch.directory;
    const int64_t slot = set * directory.ways + room.way;
    directory.SetWordOf(directory.keys, set, room.way, comer.key);
    directory.SetWordOf(directory.scores, set, room.way, comer.score);
    directory.touched[slot] = now;
    batch.slots[comer.position] = static_cast<int32_t>(slot);
    batch.old_keys[comer.position] = room.key;
    batch.old_scores[comer.position] = room.score;
    batch.old_touched[comer.position] = room.touched;
  }

  // Returns how many keys found a place.  All lanes.
  __device__ __forceinline__ int32_t Place() const {
    Comer comer = NextComer({});
    Room room = NextRoom();
    int32_t placed = 0;
    for (;; ++placed) {
      const Comer comes = FirstOfWarp(comer);
      const Room goes = FirstOfWarp(room);
      if (!comes.exists() || !goes.exists() || comes.score < goes.score) break;
      if (room.way == goes.way) {  // the lane that looks at the way again is the one that writes it
        Put(comes, goes);
        room = NextRoom();
      }
      if (comer.position == comes.position) comer = NextComer(comes);
    }
    __syncwarp();
    return placed;
  }

  // Lets those that found none wait for their other set.
  __device__ __forceinline__ void HandOn(const HashWaiting& next) const {
    ForKeys([&](int32_t key) {
      if (IsPlaced(key)) return;
      const uint64_t word = batch.KeyOf(key);
      const uint32_t first = batch.FirstSet(word);
      next.Add(first == set ? batch.SecondSet(word) : first, key);
    });
  }
};

// A warp takes 32 entries of the table of sets.
__global__ void __launch_bounds__(kThreads)
    PlaceKeys(const __grid_constant__ HashInserting batch, int side, bool evict) {
  if (batch.words[kHashNothingNew] != 0) return;
  const OpenTable<unsigned>& sets = batch.waiting[side].sets;
  const int64_t thread = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int lane = threadIdx.x % 32;
  int32_t placed = 0;
  for (int64_t first = thread - lane; first < sets.entries(); first += threads) {
    const unsigned item = first + lane < sets.entries() ? sets.items[first + lane] : 0;
    for (unsigned rest = __ballot_sync(kAllLanes, item != 0); rest != 0; rest &= rest - 1) {
      const int from = __ffs(static_cast<int>(rest)) - 1;
      const int64_t set = __shfl_sync(kAllLanes, item, from) - 1;
      const Set own(batch, side, evict, static_cast<int32_t>(first) + from, set);
      placed += own.Place();
      if (side == 0 && !evict) own.HandOn(batch.waiting[1]);
    }
  }
  if (lane == 0 && placed != 0) {
    atomicAdd(batch.words + kHashInserted, placed);
    if (evict) atomicAdd(batch.words + kHashEvicted, placed);
  }
}

}  // namespace

Status PlaceHashKeys(cudaStream_t stream, const HashInserting& batch, int side, bool evict) {
  const int64_t blocks = (batch.waiting[side].sets.entries() + kThreads - 1) / kThreads;
  return Launch(stream, std::min(blocks, kMaxBlocks), kThreads, 0, PlaceKeys, batch, side, evict);
}

}  // namespace jax_tt
