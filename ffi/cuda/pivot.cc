#include "ffi/cuda/pivot.h"

#include <algorithm>

namespace jax_tt {
namespace {

// Multiply-adds of the two products that join the sides to the pivot's slice.
double JoinCost(const Pivot& pivot) {
  const double first = static_cast<double>(pivot.left_first ? pivot.r_left : pivot.r_right);
  const double second = static_cast<double>(pivot.left_first ? pivot.r_right : pivot.r_left);
  return static_cast<double>(pivot.product_size()) * first + static_cast<double>(pivot.a * pivot.q * pivot.b) * second;
}

// Multiply-adds of one row around a pivot.
double Cost(const TTShape& shape, const Pivot& pivot) {
  double cost = 0, width = 1;
  for (int k = 0; k + 1 < pivot.core; ++k) {
    width *= static_cast<double>(shape.q[k]);
    cost += width * static_cast<double>(shape.r[k + 1] * shape.q[k + 1] * shape.r[k + 2]);
  }
  width = 1;
  for (int k = shape.d - 1; k - 1 > pivot.core; --k) {
    width *= static_cast<double>(shape.q[k]);
    cost += width * static_cast<double>(shape.r[k - 1] * shape.q[k - 1] * shape.r[k]);
  }
  return cost + JoinCost(pivot);
}

}  // namespace

Pivot MakePivot(const TTShape& shape, int core) {
  Pivot pivot;
  pivot.core = core;
  for (int k = 0; k < core; ++k) pivot.a *= shape.q[k];
  for (int k = core + 1; k < shape.d; ++k) pivot.b *= shape.q[k];
  pivot.q = shape.q[core];
  pivot.r_left = shape.r[core];
  pivot.r_right = shape.r[core + 1];
  pivot.left_first = true;
  Pivot other = pivot;
  other.left_first = false;
  return JoinCost(other) < JoinCost(pivot) ? other : pivot;
}

PivotList BackwardPivots(const TTShape& shape) {
  PivotList list;
  if (shape.d == 2) {
    list.count = 1;
    return list;
  }
  for (int k = 1; k + 1 < shape.d; ++k) list.core[list.count++] = k;
  return list;
}

int MainPivot(const TTShape& shape) {
  const PivotList pivots = BackwardPivots(shape);
  return *std::min_element(pivots.core, pivots.core + pivots.count, [&](int one, int other) {
    return Cost(shape, MakePivot(shape, one)) < Cost(shape, MakePivot(shape, other));
  });
}

}  // namespace jax_tt
