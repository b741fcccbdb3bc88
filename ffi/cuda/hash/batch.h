// A batch that is inserted: its distinct keys, and the new ones by the set that they wait for.
//
// A distinct key goes by one of its positions.  Which one depends on the order in which threads run, as does where
// things stand in these tables; what an insertion does and returns does not.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "ffi/core/hash.h"
#include "ffi/cuda/hash/hash.h"
#include "ffi/cuda/simt.h"
#include "ffi/cuda/tables/group_members.h"
#include "ffi/cuda/tables/open_table.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {

// New keys by a set that they wait for.
struct HashWaiting {
  OpenTable<unsigned> sets;     // plus 1
  GroupMembers keys;            // by the entry of their set
  int32_t* entry_of = nullptr;  // [n] of a key that was added

  void PlaceZeros(Workspace& workspace, int64_t n, int64_t all_sets) {
    sets.Place(workspace, std::min(n, all_sets));
    keys.PlaceZeros(workspace, n, sets.entries());
  }
  void PlaceRest(Workspace& workspace, int64_t n) {
    keys.ranks = workspace.Take<int32_t>(n);
    entry_of = workspace.Take<int32_t>(n);
  }

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)
  __device__ __forceinline__ void Add(uint32_t set, int32_t key) const {
    const auto entry = static_cast<int32_t>(sets.Enter(set + 1, set).entry);
    entry_of[key] = entry;
    keys.Add(entry, static_cast<unsigned>(key));
  }
  __device__ __forceinline__ int32_t Find(int32_t entry, int32_t rank) const {
    return static_cast<int32_t>(keys.Find(entry, rank, [this](unsigned key) { return entry_of[key]; }));
  }
#endif
};

// Words that all blocks share: counts, the first of which are those of an insertion, and whether there is no new key.
enum HashBatchWord { kHashNew = kHashCounts, kHashNewRequests, kHashNothingNew, kHashBatchWords };

// Passed to kernels by value.
struct HashInserting {
  HashDirectory directory;
  HashSets sets;
  HashRequests asked;

  // All zero at the start.
  int32_t* words = nullptr;              // [kHashBatchWords]
  OpenTable<unsigned> distinct;          // distinct keys, plus 1
  unsigned* requests = nullptr;          // [n] of a distinct key; 0 at the other positions
  unsigned long long* scores = nullptr;  // [n] the largest one given with a key, then its score
  HashWaiting waiting[2];                // for the set that is tried first, and for the other one

  int32_t* slots = nullptr;                // [n] where a new key was put; the capacity at all other positions
  unsigned long long* old_keys = nullptr;  // [n] what was there
  unsigned long long* old_scores = nullptr;
  int32_t* old_touched = nullptr;

  HashInserting(const HashDirectory& directory, const HashRequests& asked)
      : directory(directory), sets(directory.sets), asked(asked) {}

  // With a null workspace only the sizes are of use.  Returns the bytes of the arrays that begin as zeros.
  int64_t Place(Workspace& workspace) {
    const int64_t n = asked.batch.n;
    words = workspace.Take<int32_t>(kHashBatchWords);
    distinct.Place(workspace, n);
    requests = workspace.Take<unsigned>(n);
    scores = workspace.Take<unsigned long long>(n);
    for (HashWaiting& own : waiting) own.PlaceZeros(workspace, n, directory.sets);
    const int64_t zeros = workspace.bytes();
    for (HashWaiting& own : waiting) own.PlaceRest(workspace, n);
    slots = workspace.Take<int32_t>(n);
    old_keys = workspace.Take<unsigned long long>(n);
    old_scores = workspace.Take<unsigned long long>(n);
    old_touched = workspace.Take<int32_t>(n);
    return zeros;
  }

  JAX_TT_INLINE uint64_t KeyOf(int64_t i) const { return HashWord(asked.batch.keys, i); }
  JAX_TT_INLINE uint32_t FirstSet(uint64_t key) const {
    return sets.Of(FirstHash(static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key)));
  }
  JAX_TT_INLINE uint32_t SecondSet(uint64_t key) const {
    return sets.Of(SecondHash(static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key)));
  }
};

// Puts the new keys that wait for a set into its empty ways, or, with `evict`, in place of others; those that remain
// then wait for their other set, if there are still rounds for it.
Status PlaceHashKeys(cudaStream_t stream, const HashInserting& batch, int side, bool evict);

}  // namespace jax_tt
