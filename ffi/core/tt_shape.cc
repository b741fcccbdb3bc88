#include "ffi/core/tt_shape.h"

#include <cmath>
#include <utility>

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

double ContractionCost(const TTShape& shape, const Contraction& contraction, int64_t n) {
  const double lookups = static_cast<double>(n);
  const Side& primary = contraction.primary;
  const double join = lookups * static_cast<double>(shape.dim()) * static_cast<double>(primary.rank[primary.depth]);
  return SideCost(shape, primary, lookups) + SideCost(shape, contraction.secondary, lookups) + join;
}

Contraction ChooseContraction(const TTShape& shape, int64_t n) {
  const int64_t lookups = n > 0 ? n : 1;
  Contraction best;
  double best_cost = -1;
  for (int split = 1; split < shape.d; ++split) {
    Contraction own{MakeSide(shape, true, split), MakeSide(shape, false, shape.d - split)};
    const auto side_cost = [&](const Side& side) { return SideCost(shape, side, static_cast<double>(lookups)); };
    // Of two cores the wider one is the primary side, or the right one, whose products have the order of the columns.
    const bool swap = shape.d == 2 ? own.primary.width[1] <= own.secondary.width[1]
                                   : side_cost(own.primary) < side_cost(own.secondary);
    if (swap) std::swap(own.primary, own.secondary);
    const double cost = ContractionCost(shape, own, lookups);
    if (best_cost >= 0 && cost >= best_cost) continue;
    best_cost = cost;
    best = own;
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
