// Members of groups, gathered by one kernel for the next one: each has a number in its group, by which it is found.
#pragma once

#include <stdint.h>

#include "ffi/core/cache.h"
#include "ffi/cuda/simt.h"
#include "ffi/cuda/tables/open_table.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {

// Which number a member has depends on the order in which threads run, which numbers there are does not.
struct GroupMembers {
  OpenTable<unsigned> places;  // members, plus 1, by group and number
  int32_t* sizes = nullptr;    // [groups], all zero at the start
  int32_t* ranks = nullptr;    // number of each member, of those that were added

  // Takes what is zero at the start; `ranks` is the owner's to place.
  void PlaceZeros(Workspace& workspace, int64_t most, int64_t groups) {
    places.Place(workspace, most);
    sizes = workspace.Take<int32_t>(groups);
  }

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)
  // Returns the number of the member.
  __device__ __forceinline__ int32_t Add(int32_t group, unsigned member) const {
    const int32_t rank = atomicAdd(sizes + group, 1);
    ranks[member] = rank;
    unsigned at = Start(group, rank);
    while (atomicCAS(places.items + at, 0u, member + 1) != 0) at = places.Next(at);
    return rank;
  }

  // The member of this number, which there must be.  group_of(member): its group.
  template <typename GroupOf>
  __device__ __forceinline__ unsigned Find(int32_t group, int32_t rank, GroupOf group_of) const {
    for (unsigned at = Start(group, rank);; at = places.Next(at)) {
      const unsigned member = places.items[at] - 1;
      if (ranks[member] == rank && group_of(member) == group) return member;
    }
  }

 private:
  __device__ __forceinline__ unsigned Start(int32_t group, int32_t rank) const {
    return places.Start(CacheMix(static_cast<uint32_t>(group) + static_cast<uint32_t>(rank) * 0x9E3779B9u));
  }
#endif
};

}  // namespace jax_tt
