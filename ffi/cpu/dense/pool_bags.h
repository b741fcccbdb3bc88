// Weighted sums of the rows of a dense table, bag by bag.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "ffi/cpu/dense/bag_sums.h"
#include "ffi/cpu/dense/dense.h"
#include "ffi/cpu/ids.h"

namespace jax_tt {

// Bags per task: of few positions many.
inline int64_t PooledBags(const Lookups& lookups) {
  constexpr int64_t kPositions = 512;
  return std::clamp<int64_t>(kPositions * lookups.bags / std::max<int64_t>(lookups.capacity, 1), 1, kPositions);
}

// Fills bags [bag, bag_end) of out, adding rows in the order of their positions.  row_of(position) is a row, or an
// Unread.
template <typename T, typename RowOf>
void PoolBags(const DenseProblem<T>& problem, RowOf row_of, int64_t bag, int64_t bag_end, BagSums<T>& sums,
              typename DenseProblem<T>::C* out) {
  using C = typename DenseProblem<T>::C;
  const Lookups& lookups = problem.lookups;
  std::vector<int64_t> poisoned;
  sums.Start(problem.table, problem.weights != nullptr, out);
  for (int64_t group = bag / std::max<int64_t>(lookups.bags, 1); bag < bag_end; ++group) {
    const int32_t* offsets = lookups.offsets + group * (lookups.bags + 1) - group * lookups.bags;
    const int64_t base = group * lookups.capacity;
    for (const int64_t end = std::min(bag_end, (group + 1) * lookups.bags); bag < end; ++bag) {
      const int64_t out_at = problem.vectors.at(bag, problem.dim);
      sums.StartBag(out_at);
      for (int64_t position = base + offsets[bag]; position < base + offsets[bag + 1]; ++position) {
        const int64_t row = row_of(position);
        if (row >= 0)
          sums.Add(row, problem.weight(position));
        else if (row == kPoison && (poisoned.empty() || poisoned.back() != out_at))
          poisoned.push_back(out_at);
      }
      sums.EndBag();
    }
  }
  sums.Flush();
  for (int64_t out_at : poisoned) std::fill_n(out + out_at, problem.dim, std::numeric_limits<C>::quiet_NaN());
}

}  // namespace jax_tt
