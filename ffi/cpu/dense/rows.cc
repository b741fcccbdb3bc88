#include "ffi/cpu/dense/rows.h"

#include <algorithm>
#include <limits>

#include "ffi/cpu/ids.h"
#include "ffi/cpu/sort/radix_sort.h"

namespace jax_tt {

template <typename C>
void DenseRows<C>::RequestBuffers(int64_t n, int64_t num_embeddings, bool weighted, bool positions,
                                  Workspace& workspace) {
  n_ = n;
  bits_ = BitsFor(static_cast<uint64_t>(num_embeddings));
  workspace.Request(&sorting_, (bits_ <= 32 ? 2 : 4) * n);
  workspace.Request(&row_, n);
  workspace.Request(&at_, n);
  workspace.Request(&end_, n);
  if (weighted) workspace.Request(&weight_, n);
  if (weighted || positions) {
    workspace.Request(&position_, n);
    workspace.Request(&bag_, n);
  }
}

// Items have the row as their key, and the position, or without need of it the bag, as their number.
template <typename C>
template <typename Item, typename T, typename RowOf>
int64_t DenseRows<C>::Collect(const DenseProblem<T>& problem, RowOf row_of, Item* items, C* weight_gradient) {
  const Lookups& lookups = problem.lookups;
  int64_t count = 0, out_of_range = 0;
  if (weight_gradient != nullptr) std::fill_n(weight_gradient, n_, C{0});
  for (int64_t g = 0; g < lookups.groups; ++g) {
    const int32_t* offsets = lookups.offsets + g * (lookups.bags + 1);
    const int64_t base = g * lookups.capacity;
    for (int64_t b = 0; b < lookups.bags; ++b) {
      const auto bag = static_cast<int32_t>(g * lookups.bags + b);
      for (int64_t position = base + offsets[b]; position < base + offsets[b + 1]; ++position) {
        const int64_t row = row_of(position, &out_of_range);
        if (row >= 0) {
          items[count++] =
              Item::Make(static_cast<uint64_t>(row), bag_ == nullptr ? bag : static_cast<int32_t>(position));
          if (bag_ != nullptr) bag_[position] = bag;
        } else if (row == kPoison && weight_gradient != nullptr) {
          weight_gradient[position] = std::numeric_limits<C>::quiet_NaN();
        } else if (row == kRefused) {
          refused_ = true;
          return 0;
        }
      }
    }
  }
  out_of_range_ = out_of_range;
  return count;
}

template <typename C>
template <typename Item, typename T, typename RowOf>
void DenseRows<C>::Sort(const DenseProblem<T>& problem, RowOf row_of, C* weight_gradient) {
  Item* items = reinterpret_cast<Item*>(sorting_);
  const int64_t entries = Collect(problem, row_of, items, weight_gradient);
  items = RadixSort(items, items + n_, entries, bits_);
  int64_t rows = 0;
  for (int64_t i = 0; i < entries; ++i) {
    const auto row = static_cast<int64_t>(items[i].key());
    if (rows == 0 || row != row_[rows - 1]) row_[rows++] = row;
    end_[rows - 1] = static_cast<int32_t>(i + 1);
    int32_t bag = items[i].item();
    if (bag_ != nullptr) {
      position_[i] = bag;
      if (weight_ != nullptr) weight_[i] = problem.weight(bag);
      bag = bag_[bag];
    }
    at_[i] = problem.vectors.at(bag, problem.dim);
  }
  count_ = rows;
}

template <typename C>
template <typename T>
Status DenseRows<C>::Build(const DenseProblem<T>& problem, C* weight_gradient) {
  const Lookups& lookups = problem.lookups;
  if (Status status = CheckOffsets(lookups.offsets, lookups.groups, lookups.bags, lookups.capacity); !status.ok())
    return status;
  WithRowReader(lookups, problem.num_embeddings, [&](auto row_of) {
    if (bits_ <= 32)
      Sort<PackedItem>(problem, row_of, weight_gradient);
    else
      Sort<WideItem>(problem, row_of, weight_gradient);
  });
  if (refused_) return RefuseFirst(lookups, nullptr, problem.num_embeddings);
  if (lookups.bounds == Bounds::kWarn && out_of_range_ > 0)
    ReportFirst(lookups, nullptr, problem.num_embeddings, out_of_range_);
  return {};
}

template class DenseRows<float>;
template class DenseRows<double>;
#define JAX_TT_INSTANTIATE(T, C) template Status DenseRows<C>::Build(const DenseProblem<T>&, C*)
JAX_TT_INSTANTIATE(float, float);
JAX_TT_INSTANTIATE(double, double);
JAX_TT_INSTANTIATE(bfloat16, float);
JAX_TT_INSTANTIATE(float16, float);

}  // namespace jax_tt
