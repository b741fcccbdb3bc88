// The join of a train of two cores.
//
// A row is a b^T, of a slice a[width, rank] of the primary core and a slice b[width, rank] of the other one.  All rows
// with the same a are one matrix product: the slices b of the rows, one below the other, times a^T.  Its result has
// the numbers of a row in the order [width of b, width of a], which is called a block here.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "ffi/cpu/prefetch.h"
#include "ffi/cpu/tt/problem.h"

namespace jax_tt {

template <typename T>
class PairJoin {
 public:
  using C = typename TTProblem<T>::C;

  // Rows whose slices are asked for before they are read.
  static constexpr int64_t kAhead = 4;

  PairJoin(const TTProblem<T>& problem, int workers)
      : problem_(problem),
        kernels_(GetKernels<C>()),
        primary_(problem, problem.contraction.primary, 0, /*keep_deepest=*/true),
        secondary_(problem, problem.contraction.secondary, 1, /*keep_deepest=*/true),
        a_width_(primary_.side().width[1]),
        b_width_(secondary_.side().width[1]),
        rank_(primary_.side().rank[1]),
        ordered_(!primary_.side().left || a_width_ == 1 || b_width_ == 1),
        scratch_(static_cast<size_t>(workers)) {}

  // Rows of a matrix product: their operands stay in the first two caches.
  int64_t tile_rows() const {
    constexpr int64_t kTileElements = 8 << 10;
    return std::clamp<int64_t>(kTileElements / (b_size() + dim()), 8, 256);
  }

  void RequestBuffers(int64_t max_rows, Workspace& workspace) {
    primary_.RequestBuffers(max_rows, workspace);
    secondary_.RequestBuffers(max_rows, workspace);
    for (Scratch& scratch : scratch_) {
      workspace.Request(&scratch.transposed, a_size());
      workspace.Request(&scratch.gathered, tile_rows() * b_size());
      workspace.Request(&scratch.blocks, tile_rows() * dim());
    }
  }

  // Opens a chunk and adds the phases that convert slices to the orientation [width, rank].  Rows alone need those of
  // the primary core only where `Transposed` does.
  void Open(int64_t chunk, int64_t begin, bool rows_alone, Phases& phases) {
    primary_.Open(chunk, begin);
    secondary_.Open(chunk, begin);
    if (!rows_alone || !transposed_in_place()) primary_.AddOrientPhase(phases);
    secondary_.AddOrientPhase(phases);
  }

  // fn(begin, end) over the rows of a primary node, a tile at a time; rows count from the start of the chunk.
  template <typename Fn>
  void ForEachTile(int64_t node, Fn fn) const {
    const int64_t last = primary_.level(1).child_end[node];
    for (int64_t row = primary_.child_begin(1, node); row < last; row += tile_rows())
      fn(row, std::min(row + tile_rows(), last));
  }

  // a^T of a primary node, [rank, width].
  const C* Transposed(int64_t node, int worker) const {
    if constexpr (std::is_same_v<T, C>)
      if (transposed_in_place()) return problem_.slice(primary_.side().core[1], primary_.level(1).slice[node]);
    C* out = scratch_[static_cast<size_t>(worker)].transposed;
    kernels_.transpose(a_width_, rank_, primary_.product(1, node), out);
    return out;
  }

  // Asks for the slice of a node of a core that may be larger than the caches.
  static void Prefetch(const Chain<T>& chain, int64_t node) {
    PrefetchLines(chain.product(1, node), chain.side().product_size(1) * static_cast<int64_t>(sizeof(C)));
  }

  // The slices b of the rows of a tile, [rows * width, rank].
  const C* Gather(int64_t begin, int64_t end, int worker) const {
    C* out = scratch_[static_cast<size_t>(worker)].gathered;
    const int32_t* node = secondary_.level(1).node_of_child;
    const int64_t last = primary_.child_begin(1, primary_.nodes(1)) - 1;
    for (int64_t row = begin; row < end; ++row) {
      Prefetch(secondary_, node[std::min(row + kAhead, last)]);
      std::memcpy(out + (row - begin) * b_size(), secondary_.product(1, node[row]),
                  static_cast<size_t>(b_size()) * sizeof(C));
    }
    return out;
  }

  // out[rows, dim]: the rows of a tile, from `Gather` and `Transposed`.
  void Rows(int64_t count, const C* gathered, const C* transposed, int worker, C* out) const {
    C* blocks = ordered_ ? out : scratch_[static_cast<size_t>(worker)].blocks;
    kernels_.gemm_nn(count * b_width_, a_width_, rank_, gathered, rank_, transposed, a_width_, blocks, a_width_,
                     /*accumulate=*/false);
    if (ordered_) return;
    for (int64_t row = 0; row < count; ++row)
      kernels_.transpose(b_width_, a_width_, blocks + row * dim(), out + row * dim());
  }

  // Adds phases that compute all rows of a chunk, out[rows, dim].  No products are saved.
  void AddRowPhases(int64_t chunk, int64_t begin, C* /*saved*/, C* out, Phases& phases) {
    Open(chunk, begin, /*rows_alone=*/true, phases);
    phases.Add(primary_.nodes(1), [=, this](int64_t node, int worker) {
      const C* transposed = Transposed(node, worker);
      ForEachTile(node, [&](int64_t begin, int64_t end) {
        Rows(end - begin, Gather(begin, end, worker), transposed, worker, out + begin * dim());
      });
    });
  }

  const Chain<T>& primary() const { return primary_; }
  const Chain<T>& secondary() const { return secondary_; }
  const Kernels<C>& kernels() const { return kernels_; }
  int64_t dim() const { return a_width_ * b_width_; }
  int64_t a_width() const { return a_width_; }
  int64_t b_width() const { return b_width_; }
  int64_t rank() const { return rank_; }
  int64_t a_size() const { return a_width_ * rank_; }
  int64_t b_size() const { return b_width_ * rank_; }
  bool ordered() const { return ordered_; }  // whether blocks have the order of the columns

 private:
  struct Scratch {
    C* transposed = nullptr;
    C* gathered = nullptr;
    C* blocks = nullptr;
  };

  bool transposed_in_place() const { return !primary_.side().left && std::is_same_v<T, C>; }

  const TTProblem<T>& problem_;
  const Kernels<C>& kernels_;
  Chain<T> primary_, secondary_;
  const int64_t a_width_, b_width_, rank_;
  const bool ordered_;
  std::vector<Scratch> scratch_;
};

}  // namespace jax_tt
