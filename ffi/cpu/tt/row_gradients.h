// The gradients of the rows of a chunk, from those of the bags.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ffi/cpu/dense/long_sum.h"
#include "ffi/cpu/tt/problem.h"

namespace jax_tt {

// out_gradient: [groups * bags, dim].  weight_gradient: [n], or null.
template <typename T>
class RowGradients {
 public:
  using C = typename TTProblem<T>::C;

  RowGradients(const TTProblem<T>& problem, const C* out_gradient, C* weight_gradient)
      : problem_(problem), out_gradient_(out_gradient), weight_gradient_(weight_gradient) {}

  void RequestBuffers(int workers, Workspace& workspace) {
    sums_.resize(static_cast<size_t>(workers));
    for (LongSum<C>& sum : sums_) sum.RequestBuffers(problem_.shape.dim(), workspace);
  }

  void Open(int64_t chunk_begin) { chunk_begin_ = chunk_begin; }

  // The sum over the positions of a row of weight times gradient of the bag; in `scratch` if it is a sum.
  const C* Sum(int64_t row, C* scratch, int worker) {
    const int64_t dim = problem_.shape.dim();
    const int32_t* order = problem_.layout.order(problem_.plan);
    const int32_t* bag = problem_.layout.bag(problem_.plan);
    const auto [begin, end] = Positions(row);
    if (end - begin == 1 && problem_.weights == nullptr) return out_gradient_ + bag[order[begin]] * dim;
    std::fill_n(scratch, dim, C{0});
    LongSum<C>& sum = sums_[static_cast<size_t>(worker)];
    sum.Open(scratch);
    for (int64_t i = begin; i < end; ++i)
      kernels_.axpy(dim, problem_.weight(order[i]), out_gradient_ + bag[order[i]] * dim, sum.Next());
    sum.Close();
    return scratch;
  }

  bool wants_weights() const { return weight_gradient_ != nullptr; }

  // Stores the gradients of the weights of a row's positions.
  void SetWeights(int64_t row, const C* values) const {
    const int64_t dim = problem_.shape.dim();
    const int32_t* order = problem_.layout.order(problem_.plan);
    const int32_t* bag = problem_.layout.bag(problem_.plan);
    const auto [begin, end] = Positions(row);
    for (int64_t i = begin; i < end; ++i)
      weight_gradient_[order[i]] = kernels_.dot(dim, values, out_gradient_ + bag[order[i]] * dim);
  }

 private:
  std::pair<int64_t, int64_t> Positions(int64_t row) const {
    const int32_t* row_end = problem_.layout.row_end(problem_.plan);
    const int64_t global = chunk_begin_ + row;
    return {global == 0 ? 0 : row_end[global - 1], row_end[global]};
  }

  const TTProblem<T>& problem_;
  const Kernels<C>& kernels_ = GetKernels<C>();
  const C* out_gradient_;
  C* weight_gradient_;
  int64_t chunk_begin_ = 0;
  std::vector<LongSum<C>> sums_;
};

}  // namespace jax_tt
