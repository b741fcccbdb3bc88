// Data shared by the TT passes: the problem, and the chain products of one chunk of the plan.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "ffi/core/half.h"
#include "ffi/core/plan.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cpu/kernels/kernels.h"
#include "ffi/cpu/parallel.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {

// T is the storage type of the cores, C the type of the arithmetic.
template <typename T>
struct TTProblem {
  using C = typename ComputeType<T>::type;

  TTShape shape;
  Contraction contraction;
  PlanLayout layout;
  const int32_t* plan = nullptr;
  const T* cores[kMaxCores] = {};
  const C* weights = nullptr;        // [n], or null for ones
  const int32_t* offsets = nullptr;  // [groups, bags + 1]
  int64_t groups = 0, capacity = 0, bags = 0;
  bool poison = false;  // Bounds::kPoison

  // Whether an id out of range makes its bag NaN, so that the gradients are meaningless.
  bool poisoned() const { return poison && layout.header(plan)[PlanLayout::kOutOfRange] != 0; }
  int64_t num_chunks() const { return layout.header(plan)[PlanLayout::kChunks]; }
  int64_t out_size() const { return groups * bags * shape.dim(); }
  int64_t num_rows() const { return layout.header(plan)[PlanLayout::kRows]; }
  C weight(int64_t position) const { return weights == nullptr ? C{1} : weights[position]; }
  const T* slice(int core, int64_t index) const { return cores[core] + index * shape.slice_size(core); }
};

// Nodes of a level that share a slice: [begin, end).
struct SliceGroup {
  int64_t slice, begin, end;
};

// Converts the slice [r_left, q, r_right] of a core to the orientation of its chain, [r_in, q, r_out].
template <typename T, typename C>
void OrientSlice(const TTShape& shape, const Side& side, int position, const T* slice, C* out) {
  const int core = side.core[position];
  const int64_t rows = shape.r[core], q = shape.q[core], cols = shape.r[core + 1];
  if (side.left) {
    for (int64_t i = 0; i < rows * q * cols; ++i) out[i] = ToCompute(slice[i]);
    return;
  }
  if constexpr (std::is_same_v<T, C>)
    if (cols == 1) return GetKernels<C>().transpose(rows, q, slice, out);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < q; ++j)
      for (int64_t k = 0; k < cols; ++k) out[(k * q + j) * rows + i] = ToCompute(slice[(i * q + j) * cols + k]);
}

// Converts a slice of a right side from the orientation of its chain to that of its core.
template <typename C>
void RestoreSlice(const TTShape& shape, const Side& side, int position, const C* oriented, C* out) {
  const int core = side.core[position];
  const int64_t rows = shape.r[core], q = shape.q[core], cols = shape.r[core + 1];
  if (cols == 1) return GetKernels<C>().transpose(q, rows, oriented, out);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < q; ++j)
      for (int64_t k = 0; k < cols; ++k) out[(i * q + j) * cols + k] = oriented[(k * q + j) * rows + i];
}

// One side of one chunk: its levels, its slice groups and the buffers of its products.
template <typename T>
class Chain {
 public:
  using C = typename TTProblem<T>::C;

  // `first_level` is the side's first level in the plan; products of the deepest level are kept when `keep_deepest`.
  Chain(const TTProblem<T>& problem, const Side& side, int first_level, bool keep_deepest)
      : problem_(&problem), side_(side), first_level_(first_level), keep_deepest_(keep_deepest) {}

  void RequestBuffers(int64_t max_rows, Workspace& workspace) {
    for (int k = 1; k <= side_.depth; ++k) {
      const int64_t nodes = k == 1 ? std::min(max_rows, problem_->shape.p[side_.core[1]]) : max_rows;
      if (has_buffer(k)) workspace.Request(&product_[k], nodes * side_.product_size(k));
    }
  }

  // Opens a chunk of the plan.
  void Open(int64_t chunk, int64_t begin) {
    const int32_t* counts = problem_->layout.chunk(problem_->plan, chunk) + 1 + first_level_;
    for (int k = 1; k <= side_.depth; ++k) {
      level_[k] = problem_->layout.level(problem_->plan, first_level_ + k - 1, begin);
      nodes_[k] = counts[k - 1];
      std::vector<SliceGroup>& groups = groups_[k];
      groups.clear();
      for (int64_t u = 0; u < nodes_[k]; ++u) {
        if (groups.empty() || groups.back().slice != level_[k].slice[u]) groups.push_back({level_[k].slice[u], u, u});
        groups.back().end = u + 1;
      }
    }
  }

  const Side& side() const { return side_; }
  int depth() const { return side_.depth; }
  int64_t nodes(int k) const { return nodes_[k]; }
  const LevelView<const int32_t>& level(int k) const { return level_[k]; }
  const std::vector<SliceGroup>& groups(int k) const { return groups_[k]; }
  int64_t child_begin(int k, int64_t node) const { return node == 0 ? 0 : level_[k].child_end[node - 1]; }

  // The product of a node, [width(k), rank(k)]; a level-1 product is the slice itself, read in place if possible.
  const C* product(int k, int64_t node) const {
    if constexpr (std::is_same_v<T, C>)
      if (in_place(k)) return problem_->slice(side_.core[k], level_[k].slice[node]);
    return product_[k] + node * side_.product_size(k);
  }

  // The slice of a group in the chain's orientation; `scratch` is used if it cannot be read in place.
  const C* Oriented(int k, int64_t slice, C* scratch) const {
    const T* stored = problem_->slice(side_.core[k], slice);
    if constexpr (std::is_same_v<T, C>)
      if (side_.left) return stored;
    OrientSlice(problem_->shape, side_, k, stored, scratch);
    return scratch;
  }

  // Gathers the parents' products of nodes [begin, end) at level k into [nodes, width(k - 1), rank(k - 1)].
  void GatherParents(int k, int64_t begin, int64_t end, C* out) const {
    const int64_t size = side_.product_size(k - 1);
    for (int64_t u = begin; u < end; ++u) {
      const C* parent = product(k - 1, level_[k - 1].node_of_child[u]);
      std::memcpy(out + (u - begin) * size, parent, static_cast<size_t>(size) * sizeof(C));
    }
  }

  // Adds a phase that fills the product buffer of level 1, if there is one.
  void AddOrientPhase(Phases& phases) {
    if (!has_buffer(1)) return;
    phases.AddBlocks(nodes_[1], 16, [this](int64_t begin, int64_t end, int) {
      for (int64_t u = begin; u < end; ++u)
        OrientSlice(problem_->shape, side_, 1, problem_->slice(side_.core[1], level_[1].slice[u]),
                    product_[1] + u * side_.product_size(1));
    });
  }

  // Adds phases that fill the product buffers of this chunk, level by level.
  void AddProductPhases(const std::vector<C*>& slice_scratch, const std::vector<C*>& parent_scratch, int64_t tile_nodes,
                        const Kernels<C>& kernels, Phases& phases) {
    AddOrientPhase(phases);
    for (int k = 2; k <= side_.depth; ++k) {
      if (!has_buffer(k)) continue;
      phases.Add(static_cast<int64_t>(groups_[k].size()), [=, &kernels, this](int64_t task, int worker) {
        const SliceGroup& group = groups_[k][task];
        const C* slice = Oriented(k, group.slice, slice_scratch[worker]);
        for (int64_t u = group.begin; u < group.end; u += tile_nodes) {
          const int64_t end = u + tile_nodes < group.end ? u + tile_nodes : group.end;
          Extend(k, u, end, slice, parent_scratch[worker], kernels, product_[k] + u * side_.product_size(k));
        }
      });
    }
  }

  // Computes the products of nodes [begin, end) at level k, all of which have this (oriented) slice.
  void Extend(int k, int64_t begin, int64_t end, const C* slice, C* parents, const Kernels<C>& kernels, C* out) const {
    GatherParents(k, begin, end, parents);
    const int64_t rank = side_.rank[k - 1], columns = side_.product_size(k) / side_.width[k - 1];
    kernels.gemm_nn((end - begin) * side_.width[k - 1], columns, rank, parents, rank, slice, columns, out, columns,
                    /*accumulate=*/false);
  }

 private:
  bool in_place(int k) const { return k == 1 && side_.left && std::is_same_v<T, C>; }
  bool has_buffer(int k) const { return k == side_.depth && k > 1 ? keep_deepest_ : !in_place(k); }

  const TTProblem<T>* problem_;
  Side side_;
  int first_level_;
  bool keep_deepest_;
  C* product_[kMaxCores + 1] = {};
  int64_t nodes_[kMaxCores + 1] = {};
  LevelView<const int32_t> level_[kMaxCores + 1] = {};
  std::vector<SliceGroup> groups_[kMaxCores + 1];
};

// Nodes of one slice per matrix product: enough rows to fill the micro-kernels, few enough to stay in the second-level
// cache.
inline int64_t TileNodes(const Side& side) {
  const int64_t bytes = side.product_size(side.depth) * 4;
  const int64_t nodes = (int64_t{192} << 10) / (bytes + 1);
  return nodes < 8 ? 8 : nodes > 256 ? 256 : nodes;
}

}  // namespace jax_tt
