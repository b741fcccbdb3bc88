// A set of words that the threads of a kernel fill together, without locks: a hash table with open addressing.
//
// Where an item stands depends on the order in which threads run, what stands in the table does not.
#pragma once

#include <stdint.h>

#include "ffi/core/host_device.h"
#include "ffi/cuda/simt.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {

// Item: an unsigned word, of which 0 is an empty entry.
template <typename Item>
struct OpenTable {
  Item* items = nullptr;  // [entries], all zero at the start
  int bits = 1;           // it has 2^bits entries

  // At least twice as many entries as there can be items.
  void Place(Workspace& workspace, int64_t most) {
    while (entries() < 2 * most) ++bits;
    items = workspace.Take<Item>(entries());
  }

  JAX_TT_INLINE int64_t entries() const { return int64_t{1} << bits; }

  // Hashes of a set or of a bucket have a remainder in common, so these take the top bits of what mixes all.
  JAX_TT_INLINE unsigned Start(uint32_t hash) const { return hash * 0x9E3779B9u >> (32 - bits); }
  JAX_TT_INLINE unsigned Next(unsigned entry) const { return (entry + 1) & static_cast<unsigned>(entries() - 1); }

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)
  struct Entered {
    unsigned entry;
    Item item;  // what stands there
    bool made;  // by this call
  };

  // The entry of an item, which is made where there is none.  same(other): whether they are the same.
  template <typename Same>
  __device__ __forceinline__ Entered Enter(Item item, uint32_t hash, Same same) const {
    for (unsigned entry = Start(hash);; entry = Next(entry)) {
      const Item seen = atomicCAS(items + entry, Item{0}, item);
      if (seen == 0) return {entry, item, true};
      if (same(seen)) return {entry, seen, false};
    }
  }
  __device__ __forceinline__ Entered Enter(Item item, uint32_t hash) const {
    return Enter(item, hash, [item](Item seen) { return seen == item; });
  }
#endif
};

}  // namespace jax_tt
