// Finds places for the new keys of a batch.
#pragma once

#include <stdint.h>

#include "ffi/cpu/hash/hash.h"
#include "ffi/cpu/sort/radix_sort.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {

class HashPlacement {
 public:
  struct Counts {
    int64_t distinct = 0, inserted = 0, evicted = 0;
  };

  HashPlacement(const HashEntry& entry, const HashStamp& stamp)
      : directory_(entry.directory), asked_(entry.asked), done_(entry.done), stamp_(stamp) {}

  // Requests memory for any batch of this size.
  void Request(Workspace& workspace);

  // Inserts the keys of the `misses` positions that are present and whose slot in `found` is -1, and says where in the
  // other results, whose entries are those of a batch without new keys.
  Counts Place(int64_t misses);

 private:
  struct NewKey {
    uint64_t key, score, old_key, old_score;
    int32_t homes[2];  // in the order in which they are tried
    bool full[2];      // whether a home had no empty way before this batch
    int32_t slot, old_touched;
  };

  void Gather();
  void MakeDistinct();
  void ChooseHomes();
  void Round(int side, bool evict);
  void FillEmpty(int64_t set, const PackedItem* keys, int64_t count);
  void Replace(int64_t set, const PackedItem* keys, int64_t count);
  void Put(NewKey* key, int64_t slot);
  void PrefetchSet(int64_t set) const;

  const HashDirectory& directory_;
  const HashRequests& asked_;
  const HashInsertion& done_;
  const HashStamp stamp_;

  int64_t misses_ = 0, distinct_ = 0;
  PackedItem *items_ = nullptr, *other_items_ = nullptr;  // [n], of which `misses` are used
  NewKey* keys_ = nullptr;                                // [n], of which `distinct` are used
};

}  // namespace jax_tt
