// Weighted sums of the rows of a dense table, bag by bag.
#ifndef JAX_TT_CPU_POOL_BAGS_H_
#define JAX_TT_CPU_POOL_BAGS_H_

#include <stdint.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "ffi/core/plan.h"
#include "ffi/cpu/dense.h"
#include "ffi/cpu/kernels/kernels.h"
#include "ffi/cpu/prefetch.h"

namespace jax_tt {

// Rows to prefetch ahead: reading a row from memory takes about as long as adding eight.
constexpr int64_t kPrefetchDistance = 8;
// Bags per task.
constexpr int64_t kPooledBags = 16;

template <typename T>
void PrefetchRow(const T* row, int64_t dim) {
  PrefetchLines(row, dim * static_cast<int64_t>(sizeof(T)));
}

// Fills bags [bag, bag_end) of out [groups * bags, dim], adding rows in the order of their positions.  row_of[n] is
// negative if a position reads no row, kPoisoned if it makes its bag NaN.  value: scratch of `dim` elements.
template <typename T, typename Index>
void PoolBags(const DenseProblem<T>& problem, const Index* row_of, int64_t bag, int64_t bag_end,
              typename DenseProblem<T>::C* value, typename DenseProblem<T>::C* out) {
  using C = typename DenseProblem<T>::C;
  const Lookups& lookups = problem.lookups;
  const Kernels<C>& kernels = GetKernels<C>();
  for (; bag < bag_end; ++bag) {
    const int64_t group = bag / lookups.bags;
    const int32_t* offsets = lookups.offsets + group * (lookups.bags + 1) + bag % lookups.bags;
    const int64_t end = group * lookups.capacity + offsets[1];
    C* sum = out + bag * problem.dim;
    bool poisoned = false;
    std::fill_n(sum, problem.dim, C{0});
    for (int64_t position = group * lookups.capacity + offsets[0]; position < end; ++position) {
      const int64_t ahead = position + kPrefetchDistance;
      if (ahead < lookups.size() && row_of[ahead] >= 0)
        PrefetchRow(problem.table + row_of[ahead] * problem.dim, problem.dim);
      poisoned |= row_of[position] == PlanLayout::kPoisoned;
      if (row_of[position] < 0) continue;
      const T* stored = problem.table + row_of[position] * problem.dim;
      if constexpr (std::is_same_v<T, C>) {
        kernels.axpy(problem.dim, problem.weight(position), stored, sum);
      } else {
        for (int64_t i = 0; i < problem.dim; ++i) value[i] = ToCompute(stored[i]);
        kernels.axpy(problem.dim, problem.weight(position), value, sum);
      }
    }
    if (poisoned) std::fill_n(sum, problem.dim, std::numeric_limits<C>::quiet_NaN());
  }
}

}  // namespace jax_tt

#endif  // JAX_TT_CPU_POOL_BAGS_H_
