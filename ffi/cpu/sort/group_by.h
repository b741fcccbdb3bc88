// Stable grouping of items by an integer key, the primitive from which plans are built.
#pragma once

#include <stdint.h>

namespace jax_tt {

class Grouper {
 public:
  // Words of memory needed to sort n items.
  static int64_t BufferSize(int64_t n) { return 4 * n; }

  explicit Grouper(uint64_t* buffer) : buffer_(buffer) {}

  // order[n]: the items by ascending key, items with equal keys in their own order.  Keys are below `range`.
  void Sort(const uint64_t* keys, int64_t n, uint64_t range, int32_t* order);

  // Numbers the runs of equal keys along `order`: end[u] is one past the last item of group u in `order`,
  // group_of[item] its group, and group_key[u] its key.  Returns the number of groups.
  static int64_t Runs(const uint64_t* keys, int64_t n, const int32_t* order, int32_t* end, int32_t* group_of,
                      uint64_t* group_key);

 private:
  template <typename Item>
  void SortItems(const uint64_t* keys, int64_t n, int bits, int32_t* order);

  uint64_t* buffer_;
};

}  // namespace jax_tt
