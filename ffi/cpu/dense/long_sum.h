// A sum of many vectors.
//
// The first kFirst vectors are added one after the other, and so is every block of kBlock after them.  The sums of the
// blocks are added exactly, so that the error of a sum does not grow with the number of its terms.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "ffi/core/exact_sum.h"
#include "ffi/cpu/kernels/kernels.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {

// Each worker needs one.
template <typename C>
class LongSum {
 public:
  static constexpr int64_t kFirst = 256, kBlock = 32, kBlocks = 8;

  void RequestBuffers(int64_t dim, Workspace& workspace) {
    dim_ = dim;
    workspace.Request(&sum_, dim);
    workspace.Request(&lost_, dim);
    workspace.Request(&blocks_, kBlocks * dim);
  }

  // Continues the sum of the first vectors.
  void Start(const C* first) {
    std::copy_n(first, dim_, sum_);
    std::fill_n(lost_, dim_, C{0});
  }
  // [kBlocks, dim], for the sums of the next blocks.
  C* blocks() { return blocks_; }
  // Adds the first of blocks().
  void Add(int64_t blocks) { kernels_.add_exactly(dim_, blocks_, blocks, sum_, lost_); }
  void Finish(C* out) const {
    for (int64_t i = 0; i < dim_; ++i) out[i] = ExactSum(sum_[i], lost_[i]);
  }

  // The same for vectors that come one at a time: each is added to the vector that Next returns, at first `out`.
  void Open(C* out) {
    out_ = to_ = out;
    left_ = kFirst;
  }
  C* Next() {
    if (left_-- == 0) OpenBlock();
    return to_;
  }
  void Close() {
    if (to_ == out_) return;
    Add(1);
    Finish(out_);
  }

 private:
  void OpenBlock() {
    if (to_ == out_)
      Start(out_);
    else
      Add(1);
    to_ = blocks_;
    std::fill_n(to_, dim_, C{0});
    left_ = kBlock - 1;
  }

  const Kernels<C>& kernels_ = GetKernels<C>();
  int64_t dim_ = 0, left_ = 0;
  C *sum_ = nullptr, *lost_ = nullptr, *blocks_ = nullptr;
  C *out_ = nullptr, *to_ = nullptr;
};

}  // namespace jax_tt
