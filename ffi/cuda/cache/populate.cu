#include <algorithm>

#include "ffi/cuda/cache/cache.h"
#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/lanes.h"
#include "ffi/cuda/warp_reduce.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256, kSetsPerBlock = kThreads / 32;
// Ghosts that a lane asks for before it looks at the first.
constexpr int kLoads = 4;

// A ghost of a set, or none.
template <typename K>
struct Ghost {
  K tag;
  int32_t score, touched;
  int32_t place = -1;  // among the ghosts of the set

  __device__ __forceinline__ bool exists() const { return place >= 0; }
  __device__ __forceinline__ bool Before(const Ghost& other) const {
    if (CacheEntersBefore(score, touched, tag, other.score, other.touched, other.tag)) return true;
    return score == other.score && touched == other.touched && tag == other.tag && place < other.place;
  }
  __device__ __forceinline__ Ghost OfLane(int step) const {
    return {__shfl_xor_sync(kAllLanes, tag, step), __shfl_xor_sync(kAllLanes, score, step),
            __shfl_xor_sync(kAllLanes, touched, step), __shfl_xor_sync(kAllLanes, place, step)};
  }
};

// A slot of a set that may be given away, or none.
struct Row {
  int32_t held, score, touched;
  int32_t place = -1;  // way

  __device__ __forceinline__ bool exists() const { return place >= 0; }
  __device__ __forceinline__ bool Before(const Row& other) const {
    const CacheSlotRank mine{false, held != 0, score, touched}, its{false, other.held != 0, other.score, other.touched};
    return mine < its || (!(its < mine) && place < other.place);
  }
  __device__ __forceinline__ Row OfLane(int step) const {
    return {__shfl_xor_sync(kAllLanes, held, step), __shfl_xor_sync(kAllLanes, score, step),
            __shfl_xor_sync(kAllLanes, touched, step), __shfl_xor_sync(kAllLanes, place, step)};
  }
};

// A place in the bucket of a row that left its slot, or none.  The first one is given up first: empty ones, then those
// of ghosts, the last of them first.
template <typename K>
struct Seat {
  int32_t held, score;
  K tag;
  int32_t place = -1;  // in the bucket

  __device__ __forceinline__ bool exists() const { return place >= 0; }
  __device__ __forceinline__ bool Before(const Seat& other) const {
    if (held != other.held) return held < other.held;
    if (score != other.score || tag != other.tag) return CacheStaysBefore(other.score, other.tag, score, tag);
    return place < other.place;
  }
  __device__ __forceinline__ Seat OfLane(int step) const {
    return {__shfl_xor_sync(kAllLanes, held, step), __shfl_xor_sync(kAllLanes, score, step),
            __shfl_xor_sync(kAllLanes, tag, step), __shfl_xor_sync(kAllLanes, place, step)};
  }
};

// The set of one warp.  Lane l sees to the places l, l + 32, ...
template <typename K>
struct Set {
  const CacheDirectory<K>& directory;
  int64_t first_ghost, first_slot;
  unsigned ghosts, ways;
  int32_t now;

  __device__ Set(const CacheDirectory<K>& directory, int64_t set)
      : directory(directory),
        first_ghost(set * directory.shape.ghosts_per_set()),
        first_slot(set * directory.shape.ways),
        ghosts(static_cast<unsigned>(directory.shape.ghosts_per_set())),
        ways(static_cast<unsigned>(directory.shape.ways)),
        now(*directory.clock) {}

  // The first of this lane's ghosts behind `last` (of all of them, where that is none).  see(ghost) gets every one.
  template <typename See>
  __device__ __forceinline__ Ghost<K> NextGhost(const Ghost<K>& last, See see) const {
    Ghost<K> next{};
    for (unsigned first = threadIdx.x % 32; first < ghosts; first += 32 * kLoads) {
      Ghost<K> some[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const unsigned i = first + 32 * k;
        const int64_t at = first_ghost + i;
        some[k] = i < ghosts ? Ghost<K>{directory.ghost_tags[at], directory.ghost_scores[at],
                                        directory.ghost_touched[at], static_cast<int32_t>(i)}
                             : Ghost<K>{-1, 0, 0};
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        if (some[k].tag < 0) continue;
        see(some[k]);
        if (!last.exists() || last.Before(some[k])) next = Earlier(next, some[k]);
      }
    }
    return next;
  }

  // The same of the slots that were not touched in this step.
  __device__ __forceinline__ Row NextRow(const Row& last) const {
    Row next{};
    for (unsigned i = threadIdx.x % 32; i < ways; i += 32) {
      const int64_t at = first_slot + i;
      const CacheSlotRank rank = RankCacheSlot(directory.tags[at], directory.scores[at], directory.touched[at], now);
      const Row row{rank.held, rank.score, rank.touched, static_cast<int32_t>(i)};
      if (!rank.locked && (!last.exists() || last.Before(row))) next = Earlier(next, row);
    }
    return next;
  }
};

// What a lane knows of the ghosts of this step that are left outside.  Unsigned: requests that no state can hold wrap.
struct Outside {
  uint32_t ghosts = 0, requests = 0;

  __device__ __forceinline__ void Add(int32_t recent) {
    ++ghosts;
    requests += static_cast<uint32_t>(recent);
  }
  __device__ __forceinline__ void Remove(int32_t recent) {
    --ghosts;
    requests -= static_cast<uint32_t>(recent);
  }
};

// Finds who trades places: a ghost for a slot, with score and last request of the row in it.  All lanes of a warp.
template <typename K>
__device__ __forceinline__ int32_t Match(const Set<K>& set, int4* trades, Outside* outside) {
  Ghost<K> ghost = set.NextGhost({}, [&](const Ghost<K>& seen) {
    if (seen.touched == set.now) outside->Add(set.directory.ghost_recent[set.first_ghost + seen.place]);
  });
  Row row = set.NextRow({});
  int32_t count = 0;
  while (true) {
    const Ghost<K> comes = FirstOfWarp(ghost);
    const Row goes = FirstOfWarp(row);
    if (!comes.exists() || !goes.exists()) break;
    if (goes.held && !CacheIsHotter(comes.score, comes.touched, goes.score, goes.touched)) break;
    if (threadIdx.x % 32 == 0) trades[count] = make_int4(comes.place, goes.place, goes.score, goes.touched);
    ++count;
    if (ghost.place == comes.place) ghost = set.NextGhost(comes, [](const Ghost<K>&) {});
    if (row.place == goes.place) row = set.NextRow(goes);
  }
  __syncwarp();
  return count;
}

// Moves a ghost into its slot and leaves its place empty.  Returns whether a row was in the slot.
template <typename K>
__device__ __forceinline__ bool LetIn(const Set<K>& set, const int4& trade, K* evicted, Outside* outside) {
  const CacheDirectory<K>& directory = set.directory;
  const int64_t from = set.first_ghost + trade.x, to = set.first_slot + trade.y;
  const int32_t touched = directory.ghost_touched[from];
  const K left = directory.tags[to];
  if (touched == set.now) outside->Remove(directory.ghost_recent[from]);
  evicted[to] = left;
  directory.tags[to] = directory.ghost_tags[from];
  directory.scores[to] = directory.ghost_scores[from];
  directory.touched[to] = touched;
  directory.ghost_tags[from] = -1;
  directory.ghost_scores[from] = directory.ghost_touched[from] = directory.ghost_recent[from] = 0;
  return left >= 0;
}

// Makes a row that left its slot a ghost of the bucket that counts it, if it finds a place there.  All lanes of a warp.
template <typename K>
__device__ __forceinline__ void MakeGhost(const Set<K>& set, K tag, int32_t score, int32_t touched, Outside* outside) {
  const CacheDirectory<K>& directory = set.directory;
  const CacheShape& shape = directory.shape;
  const int64_t first = set.first_ghost + CacheBucketInSet(CacheHash(tag), shape) * shape.room;
  Seat<K> seat{};
  for (int64_t i = threadIdx.x % 32; i < shape.room; i += 32) {
    const K there = directory.ghost_tags[first + i];
    seat = Earlier(seat, Seat<K>{there >= 0, directory.ghost_scores[first + i], there, static_cast<int32_t>(i)});
  }
  seat = FirstOfWarp(seat);
  if (threadIdx.x % 32 == 0 && (!seat.held || CacheStaysBefore(score, tag, seat.score, seat.tag))) {
    const int64_t at = first + seat.place;
    if (seat.held && directory.ghost_touched[at] == set.now) outside->Remove(directory.ghost_recent[at]);
    directory.ghost_tags[at] = tag;
    directory.ghost_scores[at] = score;
    directory.ghost_touched[at] = touched;  // never in this step
    directory.ghost_recent[at] = 0;
  }
  __syncwarp();
}

// A warp takes a set.  trades: [sets, min(ways, ghosts of a set)].
template <typename K>
__global__ void __launch_bounds__(kThreads)
    PopulateSets(const __grid_constant__ CacheDirectory<K> directory, K* evicted, uint32_t* counts, int4* trades) {
  SharedArena arena;
  const Shared<uint32_t> sums = arena.Take<uint32_t>(kCacheCounts);
  if (threadIdx.x < kCacheCounts) sums[threadIdx.x] = 0;
  __syncthreads();
  const int64_t index = blockIdx.x * static_cast<int64_t>(kSetsPerBlock) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (index < directory.shape.sets) {
    const Set<K> set(directory, index);
    for (unsigned way = threadIdx.x % 32; way < set.ways; way += 32) evicted[set.first_slot + way] = -1;
    int4* const mine = trades + index * min(set.ways, set.ghosts);
    Outside outside;
    const int32_t inserted = Match(set, mine, &outside);
    uint32_t left = 0;
    for (int32_t i = lane; i < inserted; i += 32) left += LetIn(set, mine[i], evicted, &outside) ? 1 : 0;
    left = SumOfWarp(left);
    __syncwarp();
    for (int32_t i = 0; i < (left == 0 ? 0 : inserted); ++i) {
      const K tag = evicted[set.first_slot + mine[i].y];
      if (tag >= 0) MakeGhost(set, tag, mine[i].z, mine[i].w, &outside);
    }
    outside.ghosts = SumOfWarp(outside.ghosts);
    outside.requests = SumOfWarp(outside.requests);
    if (lane == 0) {
      atomicAdd(sums + kCacheInserted, static_cast<uint32_t>(inserted));
      atomicAdd(sums + kCacheEvicted, left);
      atomicAdd(sums + kCacheOutside, outside.ghosts);
      atomicAdd(sums + kCacheOutsideRequests, outside.requests);
    }
  }
  __syncthreads();
  if (threadIdx.x < kCacheCounts) {
    const uint32_t sum = sums[threadIdx.x];
    if (sum != 0) atomicAdd(counts + threadIdx.x, sum);
  }
}

int64_t MostTrades(const CacheShape& shape) { return shape.sets * std::min(shape.ways, shape.ghosts_per_set()); }

}  // namespace

int64_t CachePopulateWorkspace(const CacheShape& shape) {
  Workspace workspace(nullptr);
  workspace.Take<int4>(MostTrades(shape));
  return workspace.bytes();
}

template <typename K>
Status CachePopulate(cudaStream_t stream, const CacheDirectory<K>& directory, K* evicted, int32_t* counts,
                     void* workspace) {
  JAX_TT_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(counts, 0, kCacheCounts * sizeof(int32_t), stream)));
  return Launch(stream, (directory.shape.sets + kSetsPerBlock - 1) / kSetsPerBlock, kThreads,
                SharedBytes<uint32_t>(kCacheCounts), PopulateSets<K>, directory, evicted,
                reinterpret_cast<uint32_t*>(counts), Workspace(workspace).Take<int4>(MostTrades(directory.shape)));
}

template Status CachePopulate(cudaStream_t, const CacheDirectory<int32_t>&, int32_t*, int32_t*, void*);
template Status CachePopulate(cudaStream_t, const CacheDirectory<int64_t>&, int64_t*, int32_t*, void*);

}  // namespace jax_tt
