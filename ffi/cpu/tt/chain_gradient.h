// The backward pass of one side: from the gradients of its deepest products to the gradients of its slices.
//
// For a product out = in * slice the two gradients are
//   d slice = in^T d out     summed over the nodes that share the slice,
//   d in    = d out slice^T  summed over the children of the node that `in` belongs to.
// The first sum runs inside one task; the second one is a separate phase, over lists in the plan.  Each sum is computed
// by a single thread, so there are no atomics and the order of every sum is fixed.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ffi/cpu/tt/backward.h"
#include "ffi/cpu/tt/problem.h"

namespace jax_tt {

template <typename T>
class ChainGradient {
 public:
  using C = typename TTProblem<T>::C;

  // `deepest` is the deepest level whose node gradients are summed over children here.
  // With `lanes`, the gradients of level 1 are summed over the lanes of the join instead of over its children.
  ChainGradient(const TTProblem<T>& problem, const Chain<T>& chain, int deepest, bool lanes, int workers,
                int64_t tile_nodes, const CoreGradients<C>& gradients)
      : problem_(problem),
        chain_(chain),
        kernels_(GetKernels<C>()),
        deepest_(deepest),
        by_lane_(lanes),
        tile_nodes_(tile_nodes),
        gradients_(gradients),
        scratch_(static_cast<size_t>(workers)) {}

  void RequestBuffers(int64_t max_rows, Workspace& workspace) {
    const Side& side = chain_.side();
    for (int k = by_lane_ ? 2 : 1; k <= deepest_; ++k) workspace.Request(&child_[k], max_rows * side.product_size(k));
    if (by_lane_) {
      const int64_t slices = std::min(problem_.shape.p[side.core[1]], max_rows);
      const int64_t sums = std::max(kMinLanes * slices, max_rows);
      workspace.Request(&lane_, sums * side.product_size(1));
      workspace.Request(&lane_begun_, sums);
    }
    for (int k = 2; k <= deepest_; ++k) workspace.Request(&node_[k], max_rows * side.product_size(k));
    int64_t slice = problem_.shape.slice_size(side.core[1]), parents = 0;
    for (int k = 2; k <= side.depth; ++k) {
      slice = std::max(slice, problem_.shape.slice_size(side.core[k]));
      parents = std::max(parents, side.product_size(k - 1));
    }
    for (Scratch& scratch : scratch_) {
      workspace.Request(&scratch.slice, slice);
      workspace.Request(&scratch.transposed, slice);
      workspace.Request(&scratch.gradient, slice);
      workspace.Request(&scratch.parents, tile_nodes_ * parents);
    }
  }

  // Maximum number of lanes of the join for `rows` rows.  A lane, over which shares of level 1 are summed, is a fixed
  // part of the work, so the order of every sum is fixed; lanes need no more memory than one share per row.
  int64_t MaxLanes(int64_t rows) const {
    return by_lane_ ? std::clamp(rows / chain_.nodes(1), kMinLanes, kMaxLanes) : rows;
  }

  bool by_lane() const { return by_lane_; }

  // The sum of a lane's shares of a level-1 node: its first share is stored, the others are added.
  struct LaneSum {
    C* sum;
    bool add;
  };
  LaneSum ClaimLane(int64_t lane, int64_t node) {
    const int64_t index = lane * chain_.nodes(1) + node;
    const bool begun = std::exchange(lane_begun_[index], uint8_t{1}) != 0;
    return {lane_ + index * chain_.side().product_size(1), begun};
  }

  // Must be called before the join of a chunk with this number of lanes.
  void OpenLanes(int64_t lanes) {
    lanes_ = lanes;
    if (by_lane_) std::fill_n(lane_begun_, lanes * chain_.nodes(1), uint8_t{0});
  }

  // The shares of the children of level k in the gradients of its nodes: [children, product_size(k)].
  C* child(int k) const { return child_[k]; }

  // Adds the phases of levels deepest .. 1, which run after the children of the deepest level have stored their shares.
  void AddPhases(Phases& phases) {
    for (int k = deepest_; k >= 1; --k) {
      AddSumPhase(k, phases);
      if (k == 1) return;
      phases.Add(static_cast<int64_t>(chain_.groups(k).size()), [this, k](int64_t task, int worker) {
        const SliceGroup& group = chain_.groups(k)[static_cast<size_t>(task)];
        SliceGradient slice(*this, k, group, /*lane=*/0, worker);
        for (int64_t u = group.begin; u < group.end; u += tile_nodes_)
          slice.Add(u, std::min(u + tile_nodes_, group.end), node_[k] + u * chain_.side().product_size(k));
      });
    }
  }

  // Accumulates the gradient of one slice over the tiles of its group, and computes each tile's shares for its parents.
  class SliceGradient {
   public:
    SliceGradient(ChainGradient& owner, int k, const SliceGroup& group, int64_t lane, int worker)
        : owner_(owner),
          k_(k),
          worker_(worker),
          lane_(lane),
          slice_(group.slice),
          rank_(owner.chain_.side().rank[k - 1]),
          columns_(owner.chain_.side().product_size(k) / owner.chain_.side().width[k - 1]),
          scratch_(owner.scratch_[static_cast<size_t>(worker)]) {
      const Side& side = owner.chain_.side();
      const C* slice = owner.chain_.Oriented(k, group.slice, scratch_.slice);
      owner.kernels_.transpose(rank_, columns_, slice, scratch_.transposed);
      // On the left, gradients are accumulated directly in the array, onto those of earlier chunks.
      const bool in_array = side.left && !owner.gradients_.consume;
      target_ = in_array ? owner.Gradient(k, slice_) : scratch_.gradient;
      accumulate_ = in_array && owner.Touched(k, slice_) != 0;
      stored_ = in_array;
    }
    ~SliceGradient() {
      if (stored_)
        owner_.Touched(k_, slice_) = 1;
      else
        owner_.Store(k_, slice_, target_, worker_);
    }
    SliceGradient(const SliceGradient&) = delete;
    SliceGradient& operator=(const SliceGradient&) = delete;

    // gradient: of the products of nodes [begin, end), contiguous.
    void Add(int64_t begin, int64_t end, const C* gradient) {
      const int64_t rows = (end - begin) * owner_.chain_.side().width[k_ - 1];
      owner_.chain_.GatherParents(k_, begin, end, scratch_.parents);
      owner_.kernels_.gemm_tn(rows, columns_, rank_, scratch_.parents, rank_, gradient, columns_, target_, columns_,
                              accumulate_);
      const int64_t size = owner_.chain_.side().product_size(k_ - 1);
      const bool by_lane = k_ == 2 && owner_.by_lane_;
      C* shares = by_lane ? scratch_.parents : owner_.child_[k_ - 1] + begin * size;
      owner_.kernels_.gemm_nn(rows, rank_, columns_, gradient, columns_, scratch_.transposed, rank_, shares, rank_,
                              /*accumulate=*/false);
      if (by_lane)
        for (int64_t u = begin; u < end; ++u) {
          const C* share = shares + (u - begin) * size;
          const LaneSum lane = owner_.ClaimLane(lane_, owner_.chain_.level(1).node_of_child[u]);
          if (lane.add)
            owner_.kernels_.axpy(size, C{1}, share, lane.sum);
          else
            std::copy_n(share, size, lane.sum);
        }
      accumulate_ = true;
    }

   private:
    ChainGradient& owner_;
    const int k_, worker_;
    const int64_t lane_, slice_, rank_, columns_;
    typename ChainGradient::Scratch& scratch_;
    C* target_;
    bool accumulate_, stored_;
  };

  // Stores or consumes the gradient of a level-k slice, given in the chain's orientation.
  void Store(int k, int64_t slice, const C* oriented, int worker) {
    DeliverGradient(problem_.shape, chain_.side(), k, slice, oriented, gradients_,
                    scratch_[static_cast<size_t>(worker)].transposed, worker);
  }

 private:
  static constexpr int64_t kMinLanes = 4, kMaxLanes = 16;

  struct Scratch {
    C* slice = nullptr;
    C* transposed = nullptr;
    C* gradient = nullptr;
    C* parents = nullptr;
  };

  // Sums the shares of the children to the gradient of the node or, at level 1, of the slice.
  void AddSumPhase(int k, Phases& phases) {
    phases.AddBlocks(chain_.nodes(k), 8, [this, k](int64_t node, int64_t end, int worker) {
      const int64_t size = chain_.side().product_size(k);
      const LevelView<const int32_t>& level = chain_.level(k);
      for (; node < end; ++node) {
        C* sum = k == 1 ? scratch_[static_cast<size_t>(worker)].gradient : node_[k] + node * size;
        if (k == 1 && by_lane_) {
          int32_t shares[kMaxLanes];
          int64_t count = 0;
          for (int64_t index = node; index < lanes_ * chain_.nodes(1); index += chain_.nodes(1))
            if (lane_begun_[index]) shares[count++] = static_cast<int32_t>(index);
          kernels_.sum_rows(size, lane_, shares, count, sum);
        } else {
          const int64_t begin = chain_.child_begin(k, node);
          kernels_.sum_rows(size, child_[k], level.child + begin, level.child_end[node] - begin, sum);
        }
        if (k == 1) Store(1, level.slice[node], sum, worker);
      }
    });
  }

  C* Gradient(int k, int64_t slice) const {
    const int core = chain_.side().core[k];
    return gradients_.gradient[core] + slice * problem_.shape.slice_size(core);
  }
  int32_t& Touched(int k, int64_t slice) const { return gradients_.touched[chain_.side().core[k]][slice]; }

  const TTProblem<T>& problem_;
  const Chain<T>& chain_;
  const Kernels<C>& kernels_;
  const int deepest_;
  const bool by_lane_;
  const int64_t tile_nodes_;
  const CoreGradients<C>& gradients_;
  C* child_[kMaxCores + 1] = {};
  C* node_[kMaxCores + 1] = {};
  C* lane_ = nullptr;
  uint8_t* lane_begun_ = nullptr;  // whether the sum of a lane has a value
  int64_t lanes_ = 0;
  std::vector<Scratch> scratch_;
};

}  // namespace jax_tt
