// The join of the two sides of a train of three or more cores: iterates over the rows of a chunk, by slice group, with
// the products of both sides.
//
// This loop is shared by the forward and the backward pass.  The primary products of one tile of nodes are computed (or
// read back) and used for all rows of the tile while they are in the second-level cache.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <vector>

#include "ffi/cpu/tt/problem.h"

namespace jax_tt {

template <typename T>
class Join {
 public:
  using C = typename TTProblem<T>::C;

  Join(const TTProblem<T>& problem, int workers)
      : problem_(problem),
        kernels_(GetKernels<C>()),
        primary_(problem, problem.contraction.primary, 0, /*keep_deepest=*/false),
        secondary_(problem, problem.contraction.secondary, problem.contraction.primary.depth, /*keep_deepest=*/true),
        tile_nodes_(TileNodes(problem.contraction.primary)),
        narrow_(FitsNarrowJoin(primary_.side().width[primary_.depth()], secondary_.side().width[secondary_.depth()],
                               primary_.side().rank[primary_.depth()])),
        columns_(static_cast<size_t>(problem.shape.dim())),
        slice_scratch_(workers),
        parent_scratch_(workers),
        product_scratch_(workers),
        row_scratch_(workers) {
    identity_order_ = ColumnOrder(problem.shape, problem.contraction, columns_.data());
  }

  void RequestBuffers(int64_t max_rows, Workspace& workspace) {
    primary_.RequestBuffers(max_rows, workspace);
    secondary_.RequestBuffers(max_rows, workspace);
    if (!narrow_) workspace.Request(&joined_, max_rows * secondary_.side().product_size(secondary_.depth()));
    int64_t slice = 0, parents = 0;
    for (const Chain<T>* chain : {&primary_, &secondary_})
      for (int k = 2; k <= chain->depth(); ++k) {
        slice = std::max(slice, problem_.shape.slice_size(chain->side().core[k]));
        parents = std::max(parents, chain->side().product_size(k - 1));
      }
    for (size_t w = 0; w < slice_scratch_.size(); ++w) {
      workspace.Request(&slice_scratch_[w], slice);
      workspace.Request(&parent_scratch_[w], tile_nodes_ * parents);
      workspace.Request(&product_scratch_[w], tile_nodes_ * primary_.side().product_size(primary_.depth()));
      workspace.Request(&row_scratch_[w], problem_.shape.dim());
    }
  }

  // Opens a chunk on both sides and adds the phases that compute all products except the deepest of the primary side.
  // `rows`: whether rows will be joined afterwards.
  void Open(int64_t chunk, int64_t begin, bool rows, Phases& phases) {
    primary_.Open(chunk, begin);
    secondary_.Open(chunk, begin);
    for (Chain<T>* chain : {&primary_, &secondary_})
      chain->AddProductPhases(slice_scratch_, parent_scratch_, tile_nodes_, kernels_, phases);
    if (!rows || narrow_) return;
    const Side& side = secondary_.side();
    const int depth = side.depth;
    phases.AddBlocks(secondary_.nodes(depth), 16, [=, this](int64_t node, int64_t end, int) {
      for (; node < end; ++node)
        kernels_.transpose(side.width[depth], side.rank[depth], secondary_.product(depth, node),
                           joined_ + node * side.product_size(depth));
    });
  }

  // Adds phases that compute all rows of a chunk, out[rows, dim].  `saved`: see Products.
  void AddRowPhases(int64_t chunk, int64_t begin, C* saved, C* out, Phases& phases) {
    Open(chunk, begin, /*rows=*/true, phases);
    AddGroupPhase(phases, [=, this](const SliceGroup& group, int worker) {
      ForEachTile(group, worker, [&](int64_t node_begin, int64_t node_end, const C* slice) {
        const C* products = Products(node_begin, node_end, slice, worker, saved, /*have_saved=*/false);
        ForEachRow(node_begin, node_end, products, [&](int64_t row, int64_t, const C* product) {
          JoinRow(row, product, worker, out + row * problem_.shape.dim());
        });
      });
    });
  }

  // Adds a phase with one task, fn(group, worker), per slice group of the primary side.
  template <typename Fn>
  void AddGroupPhase(Phases& phases, Fn fn) {
    const int depth = primary_.depth();
    phases.Add(static_cast<int64_t>(primary_.groups(depth).size()), [this, depth, fn](int64_t task, int worker) {
      fn(primary_.groups(depth)[static_cast<size_t>(task)], worker);
    });
  }

  // Adds a phase with one task per lane: fn(group, lane, worker) over its groups.  Lanes have about the same number of
  // nodes.
  template <typename Fn>
  void AddLanePhase(int64_t lanes, Phases& phases, Fn fn) {
    phases.Add(lanes, [this, lanes, fn](int64_t lane, int worker) {
      const std::vector<SliceGroup>& groups = primary_.groups(primary_.depth());
      const int64_t nodes = primary_.nodes(primary_.depth());
      const auto first = [&](int64_t cut) {
        return std::partition_point(groups.begin(), groups.end(),
                                    [&](const SliceGroup& group) { return group.begin * lanes < cut * nodes; });
      };
      for (auto group = first(lane); group != first(lane + 1); ++group) fn(*group, lane, worker);
    });
  }

  // fn(node_begin, node_end, oriented slice) over the tiles of a group.
  template <typename Fn>
  void ForEachTile(const SliceGroup& group, int worker, Fn fn) {
    const C* slice = primary_.Oriented(primary_.depth(), group.slice, slice_scratch_[worker]);
    for (int64_t node = group.begin; node < group.end; node += tile_nodes_)
      fn(node, std::min(node + tile_nodes_, group.end), slice);
  }

  // Primary products of the tile, contiguous from node_begin on.  `saved` stores them by node, or already has them.
  const C* Products(int64_t node_begin, int64_t node_end, const C* slice, int worker, C* saved, bool have_saved) {
    const int depth = primary_.depth();
    C* products =
        saved != nullptr ? saved + node_begin * primary_.side().product_size(depth) : product_scratch_[worker];
    if (!have_saved) primary_.Extend(depth, node_begin, node_end, slice, parent_scratch_[worker], kernels_, products);
    return products;
  }

  // fn(row, node, product) over the rows of nodes [node_begin, node_end); rows count from the start of the chunk.
  template <typename Fn>
  void ForEachRow(int64_t node_begin, int64_t node_end, const C* products, Fn fn) {
    const int depth = primary_.depth();
    const int64_t size = primary_.side().product_size(depth);
    const LevelView<const int32_t>& level = primary_.level(depth);
    for (int64_t node = node_begin; node < node_end; ++node, products += size) {
      for (int64_t row = primary_.child_begin(depth, node); row < level.child_end[node]; ++row) fn(row, node, products);
    }
  }

  // out[dim] = the row, from its primary product.
  void JoinRow(int64_t row, const C* product, int worker, C* out) {
    const Side& a = primary_.side();
    const Side& b = secondary_.side();
    const int64_t rows = a.width[a.depth], cols = b.width[b.depth], rank = a.rank[a.depth];
    C* block = identity_order_ ? out : row_scratch_[worker];
    if (narrow_)
      kernels_.narrow_join(rows, cols, rank, product, secondary_.product(b.depth, secondary_node(row)), block);
    else
      kernels_.gemm_nn(rows, cols, rank, product, rank, joined_ + secondary_node(row) * b.product_size(b.depth), cols,
                       block, cols, /*accumulate=*/false);
    if (!identity_order_)
      for (int64_t i = 0; i < rows * cols; ++i) out[columns_[static_cast<size_t>(i)]] = block[i];
  }

  // Slices of the primary side's deepest level in this chunk.
  int64_t num_groups() const { return static_cast<int64_t>(primary_.groups(primary_.depth()).size()); }
  int64_t secondary_node(int64_t row) const { return secondary_.level(secondary_.depth()).node_of_child[row]; }
  const Chain<T>& primary() const { return primary_; }
  const Chain<T>& secondary() const { return secondary_; }
  const Kernels<C>& kernels() const { return kernels_; }
  const std::vector<int32_t>& columns() const { return columns_; }
  bool identity_order() const { return identity_order_; }
  int64_t tile_nodes() const { return tile_nodes_; }
  C* slice_scratch(int worker) const { return slice_scratch_[worker]; }
  C* parent_scratch(int worker) const { return parent_scratch_[worker]; }
  C* row_scratch(int worker) const { return row_scratch_[worker]; }

 private:
  const TTProblem<T>& problem_;
  const Kernels<C>& kernels_;
  Chain<T> primary_, secondary_;
  const int64_t tile_nodes_;
  const bool narrow_;             // rows are joined by narrow_join
  std::vector<int32_t> columns_;  // column of the row for each element of the joined block
  bool identity_order_ = false;
  C* joined_ = nullptr;  // secondary products transposed to [rank, width], by node, for wide joins
  std::vector<C*> slice_scratch_, parent_scratch_, product_scratch_, row_scratch_;
};

}  // namespace jax_tt
