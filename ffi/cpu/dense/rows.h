// The distinct rows of a dense table that a batch reads.
#pragma once

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/cpu/dense/dense.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {

// Rows ascend; row u is read by the entries [end[u - 1], end[u]), in the order of their positions.
template <typename C>
class DenseRows {
 public:
  // `weighted`: weight() is needed; `positions`: position() is.
  void RequestBuffers(int64_t n, int64_t num_embeddings, bool weighted, bool positions, Workspace& workspace);

  // Fills the rows of a batch.  weight_gradient[n], or null: set to NaN for an id that makes its bag NaN, and to 0.
  template <typename T>
  Status Build(const DenseProblem<T>& problem, C* weight_gradient);

  int64_t count() const { return count_; }
  int64_t row(int64_t u) const { return row_[u]; }
  int64_t begin(int64_t u) const { return u == 0 ? 0 : end_[u - 1]; }
  const int32_t* end() const { return end_; }
  // Of an entry: where the vector of its bag is, its weight, its position.
  const int64_t* at() const { return at_; }
  const C* weight() const { return weight_; }
  const int32_t* position() const { return position_; }
  int64_t out_of_range() const { return out_of_range_; }

 private:
  template <typename Item, typename T, typename RowOf>
  int64_t Collect(const DenseProblem<T>& problem, RowOf row_of, Item* items, C* weight_gradient);
  template <typename Item, typename T, typename RowOf>
  void Sort(const DenseProblem<T>& problem, RowOf row_of, C* weight_gradient);

  int64_t n_ = 0, count_ = 0, out_of_range_ = 0;
  int bits_ = 0;  // of a row
  bool refused_ = false;
  uint64_t* sorting_ = nullptr;
  int64_t *row_ = nullptr, *at_ = nullptr;
  int32_t *end_ = nullptr, *position_ = nullptr, *bag_ = nullptr;
  C* weight_ = nullptr;
};

}  // namespace jax_tt
