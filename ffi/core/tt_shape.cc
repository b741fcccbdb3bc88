#include "ffi/core/tt_shape.h"

#include <cmath>

namespace jax_tt {
namespace {

Side MakeSide(const TTShape& shape, bool left, int depth) {
  Side side;
  side.left = left;
  side.depth = depth;
  side.width[0] = side.rank[0] = 1;
  for (int k = 1; k <= depth; ++k) {
    const int core = left ? k - 1 : shape.d - k;
    side.core[k] = core;
    side.width[k] = side.width[k - 1] * shape.q[core];
    side.rank[k] = left ? shape.r[core + 1] : shape.r[core];
  }
  return side;
}

// Expected number of distinct values among n uniform draws out of `range`.
double ExpectedDistinct(double range, double n) { return -range * std::expm1(-n / range); }

// Multiply-adds of the chain products of a side for n uniform lookups.
double SideCost(const TTShape& shape, const Side& side, double n) {
  double cost = 0, range = shape.p[side.core[1]];
  for (int k = 2; k <= side.depth; ++k) {
    range *= static_cast<double>(shape.p[side.core[k]]);
    cost += ExpectedDistinct(range, n) * static_cast<double>(side.product_size(k - 1)) *
            static_cast<double>(shape.q[side.core[k]] * side.rank[k]);
  }
  return cost;
}

}  // namespace

Contraction ChooseContraction(const TTShape& shape, int64_t n) {
  const double lookups = n > 0 ? static_cast<double>(n) : 1.0;
  Contraction best;
  double best_cost = -1;
  for (int split = 1; split < shape.d; ++split) {
    const Side left = MakeSide(shape, true, split), right = MakeSide(shape, false, shape.d - split);
    const double left_cost = SideCost(shape, left, lookups), right_cost = SideCost(shape, right, lookups);
    const double join = lookups * static_cast<double>(shape.dim()) * static_cast<double>(shape.r[split]);
    if (best_cost >= 0 && left_cost + right_cost + join >= best_cost) continue;
    best_cost = left_cost + right_cost + join;
    best.primary = left_cost >= right_cost ? left : right;
    best.secondary = left_cost >= right_cost ? right : left;
  }
  return best;
}

bool ColumnOrder(const TTShape& shape, const Contraction& contraction, int32_t* columns) {
  int64_t stride[kMaxCores];
  for (int64_t k = shape.d - 1, s = 1; k >= 0; s *= shape.q[k--]) stride[k] = s;
  // Within a chain position 1 is slowest, whichever side it grows from.
  const auto offset = [&](const Side& side, int64_t index) {
    int64_t sum = 0;
    for (int k = side.depth; k >= 1; --k) {
      sum += index % shape.q[side.core[k]] * stride[side.core[k]];
      index /= shape.q[side.core[k]];
    }
    return sum;
  };
  const int64_t rows = contraction.primary.width[contraction.primary.depth];
  const int64_t cols = contraction.secondary.width[contraction.secondary.depth];
  bool identity = true;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const int64_t column = offset(contraction.primary, i) + offset(contraction.secondary, j);
      columns[i * cols + j] = static_cast<int32_t>(column);
      identity &= column == i * cols + j;
    }
  }
  return identity;
}

}  // namespace jax_tt
