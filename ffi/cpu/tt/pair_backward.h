// Gradients of a train of two cores: matrix products of all rows that share a slice.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <vector>

#include "ffi/cpu/tt/backward.h"
#include "ffi/cpu/tt/pair.h"
#include "ffi/cpu/tt/row_gradients.h"

namespace jax_tt {

template <typename T>
class PairBackward {
 public:
  using C = typename TTProblem<T>::C;

  PairBackward(const TTProblem<T>& problem, const Pool& pool, const CoreGradients<C>& gradients,
               const RowGradients<T>& row_gradients)
      : problem_(problem),
        pool_(pool),
        gradients_(gradients),
        rows_(row_gradients),
        join_(problem, pool.workers),
        shares_by_row_(2 * join_.b_size() <= join_.a_size() + join_.dim()),
        scratch_(static_cast<size_t>(pool.workers)) {}

  Status Run() {
    const int64_t max_rows = std::min(problem_.layout.chunk_rows, problem_.num_rows());
    rows_.RequestBuffers(pool_.workers, workspace_);
    join_.RequestBuffers(max_rows, workspace_);
    if (shares_by_row_) {
      workspace_.Request(&shares_, max_rows * join_.b_size());
    } else {
      workspace_.Request(&blocks_, max_rows * join_.dim());
      workspace_.Request(&kept_, std::min(max_rows, problem_.shape.p[core(join_.primary())]) * join_.a_size());
    }
    for (Scratch& scratch : scratch_) {
      for (C** buffer : {&scratch.sum, &scratch.stored})
        workspace_.Request(buffer, std::max(join_.a_size(), join_.b_size()));
      workspace_.Request(&scratch.row, join_.dim());
      for (C** buffer : {&scratch.blocks, &scratch.values}) workspace_.Request(buffer, join_.tile_rows() * join_.dim());
    }
    if (Status status = workspace_.Allocate(); !status.ok()) return status;
    for (int64_t c = 0, begin = 0; c < problem_.num_chunks(); ++c) {
      Phases phases;
      rows_.Open(begin);
      join_.Open(c, begin, /*rows_alone=*/false, phases);
      phases.Add(join_.primary().nodes(1), [this](int64_t node, int worker) { Primary(node, worker); });
      phases.AddBlocks(join_.secondary().nodes(1), 4, [this](int64_t node, int64_t end, int worker) {
        for (; node < end; ++node) Secondary(node, worker);
      });
      if (!shares_by_row_)
        phases.AddBlocks(join_.primary().nodes(1), 4, [this](int64_t node, int64_t end, int worker) {
          for (; node < end; ++node) Deliver(join_.primary(), node, kept_ + node * join_.a_size(), worker);
        });
      pool_.Run(phases);
      begin = problem_.layout.chunk(problem_.plan, c)[0];
    }
    return {};
  }

 private:
  struct Scratch {
    C *sum = nullptr, *stored = nullptr;  // a gradient, and the same in the orientation of the core
    C* row = nullptr;
    C *blocks = nullptr, *values = nullptr;  // of the rows of a tile
  };

  // da = the sum over rows of g^T b, for blocks g.
  void Primary(int64_t node, int worker) {
    const Scratch& scratch = scratch_[static_cast<size_t>(worker)];
    const Chain<T>& side = join_.primary();
    const C* transposed = rows_.wants_weights() ? join_.Transposed(node, worker) : nullptr;
    C* sum = shares_by_row_ ? scratch.sum : kept_ + node * join_.a_size();
    bool add = false;
    join_.ForEachTile(node, [&](int64_t begin, int64_t end) {
      const int64_t count = (end - begin) * join_.b_width(), a_width = join_.a_width(), rank = join_.rank();
      const C* b = join_.Gather(begin, end, worker);
      C* g = shares_by_row_ ? scratch.blocks : blocks_ + begin * join_.dim();
      for (int64_t row = begin; row < end; ++row) Block(row, scratch.row, g + (row - begin) * join_.dim(), worker);
      join_.kernels().gemm_tn(count, rank, a_width, g, a_width, b, rank, sum, rank, add);
      add = true;
      if (shares_by_row_)
        join_.kernels().gemm_nn(count, rank, a_width, g, a_width, side.product(1, node), rank,
                                shares_ + begin * join_.b_size(), rank, /*accumulate=*/false);
      if (!rows_.wants_weights()) return;
      join_.Rows(end - begin, b, transposed, worker, scratch.values);
      for (int64_t row = begin; row < end; ++row) rows_.SetWeights(row, scratch.values + (row - begin) * join_.dim());
    });
    if (shares_by_row_) Deliver(side, node, sum, worker);
  }

  // db = the sum over rows of g a, from shares of the rows if these are short, or else from the factors.
  void Secondary(int64_t node, int worker) {
    const Chain<T>& side = join_.secondary();
    const int32_t* child = side.level(1).child;
    const int64_t begin = side.child_begin(1, node), end = side.level(1).child_end[node];
    C* sum = scratch_[static_cast<size_t>(worker)].sum;
    if (shares_by_row_) {
      join_.kernels().sum_rows(join_.b_size(), shares_, child + begin, end - begin, sum);
    } else {
      const int32_t* primary = join_.primary().level(1).node_of_child;
      const int64_t last = side.child_begin(1, side.nodes(1)) - 1;
      for (int64_t i = begin; i < end; ++i) {
        const int32_t ahead = child[std::min(i + join_.kAhead, last)];
        PairJoin<T>::Prefetch(join_.primary(), primary[ahead]);
        PrefetchLines(blocks_ + ahead * join_.dim(), join_.dim() * static_cast<int64_t>(sizeof(C)));
        join_.kernels().gemm_nn(join_.b_width(), join_.rank(), join_.a_width(), blocks_ + child[i] * join_.dim(),
                                join_.a_width(), join_.primary().product(1, primary[child[i]]), join_.rank(), sum,
                                join_.rank(), /*accumulate=*/i > begin);
      }
    }
    Deliver(side, node, sum, worker);
  }

  // The gradient of a row as a block.
  void Block(int64_t row, C* scratch, C* out, int worker) {
    if (!join_.ordered())
      return join_.kernels().transpose(join_.a_width(), join_.b_width(), rows_.Sum(row, scratch, worker), out);
    const C* sum = rows_.Sum(row, out, worker);
    if (sum != out) std::copy_n(sum, join_.dim(), out);
  }

  void Deliver(const Chain<T>& side, int64_t node, const C* gradient, int worker) {
    DeliverGradient(problem_.shape, side.side(), 1, side.level(1).slice[node], gradient, gradients_,
                    scratch_[static_cast<size_t>(worker)].stored, worker);
  }

  static int core(const Chain<T>& chain) { return chain.side().core[1]; }

  const TTProblem<T>& problem_;
  const Pool& pool_;
  const CoreGradients<C>& gradients_;
  RowGradients<T> rows_;
  Workspace workspace_;
  PairJoin<T> join_;
  // Whether the rows store their shares of db; if these are long, it is cheaper to read a and g again.
  const bool shares_by_row_;
  C* shares_ = nullptr;  // by row, [width of b, rank]
  C* blocks_ = nullptr;  // gradients of all rows
  C* kept_ = nullptr;    // da of all nodes, until a is no longer read
  std::vector<Scratch> scratch_;
};

}  // namespace jax_tt
