// Where the vectors of bags are in an output or its gradient.
#pragma once

#include <stdint.h>

#include "ffi/core/host_device.h"

namespace jax_tt {

// One after another, or, with columns, those of each `bags` bags in consecutive rows of `stride` elements, from the
// next of the columns on.
struct BagVectors {
  const int64_t* columns = nullptr;
  int64_t bags = 0, stride = 0;

  // The number of columns, of a table with this many bags.
  JAX_TT_INLINE int64_t features(int64_t all_bags) const {
    return columns == nullptr || bags == 0 ? 0 : all_bags / bags;
  }
  JAX_TT_INLINE int64_t at(int64_t bag, int64_t dim) const {
    if (columns == nullptr) return bag * dim;
    return bag < bags ? bag * stride + columns[0] : BehindFirst(bag);
  }
  // The same of a bag that is not one of the first column.
  JAX_TT_INLINE int64_t BehindFirst(int64_t bag) const {
    // One call takes at most 2^31 - 1 bags, and narrow divisions are several times as fast.
    const uint32_t narrow = static_cast<uint32_t>(bag), each = static_cast<uint32_t>(bags);
    return narrow % each * stride + columns[narrow / each];
  }
};

}  // namespace jax_tt
