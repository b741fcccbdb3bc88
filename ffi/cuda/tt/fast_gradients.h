// The gradients of a tile's rows, from those of the bags that the rows are in.
#pragma once

#include <algorithm>

#include "ffi/cuda/tt/fast_tile.h"
#include "ffi/cuda/tt/terms.h"

namespace jax_tt {

struct BagGradients {
  const float *of_bags = nullptr, *weights = nullptr;  // [bags, D]; of positions, or null for ones
  int64_t order = 0, bag = 0, row_begin = 0;           // in the plan

  // Of a place in the order of positions.
  __device__ __forceinline__ Term TermAt(const int32_t* plan, int64_t place) const {
    const int64_t position = plan[order + place];
    return {plan[bag + position], weights == nullptr ? 1.0f : weights[position]};
  }
};

// The columns of a row in the block of columns that begins at column c = first, as vectors of four neighbours in
// memory. They lie in runs, which are shorter than a vector only where a block has one column c.
template <typename Tile, typename T>
class RowVectors {
 public:
  __device__ __forceinline__ RowVectors(const FastArgs<T>& args, int first)
      : args_(args),
        first_(first),
        log_inner_(args.mirrored ? args.log_a : args.log_b),
        log_run_(max(Log2(Tile::kCount) + log_inner_ - 2, 0)) {}

  __device__ __forceinline__ int log_count() const { return log_run_ + (args_.mirrored ? args_.log_b : args_.log_a); }
  // Where vector v begins in a row.
  __device__ __forceinline__ int Place(int v) const {
    const int outer = v >> log_run_, within = v & ((1 << log_run_) - 1);
    return ((((outer << args_.log_q) + first_) << log_inner_) & ~3) + 4 * within;
  }
  // Puts a vector where the tile has it, [a, count, b].
  __device__ __forceinline__ void Store(int v, const Columns<4>& values, Shared<float> to) const {
    const int place = Place(v);
    JAX_TT_UNROLL
    for (int e = 0; e < 4; ++e) {
      const int inner = (place + e) & ((1 << log_inner_) - 1), outer = (place + e) >> (log_inner_ + args_.log_q);
      const int c = (((place + e) >> log_inner_) & (args_.q() - 1)) - first_;
      const int w = args_.mirrored ? inner : outer, j = args_.mirrored ? outer : inner;
      if (c >= 0 && c < Tile::kCount) to[((w * Tile::kCount + c) << args_.log_b) + j] = values.value[e];
    }
  }

 private:
  const FastArgs<T>& args_;
  const int first_, log_inner_, log_run_;
};

// Loads them, [row, a, count, b], from place `first` in the order of rows on.
template <typename Tile>
class TileGradients {
  // A row of so many positions at most is one thread's sum, of four columns.  A longer one is divided among all threads
  // of the block, in a way that depends on its length alone.
  static constexpr int kShort = 8;
  static constexpr int kAheadOfLong = 16;             // lines of a long row that a thread loads at once
  static constexpr int kStaged = 4 * Tile::kThreads;  // terms of a long row in shared memory
  static constexpr int kTerms = std::max(kStaged, Tile::kMaxRows* kShort);

 public:
  static constexpr int kFloats = 2 * kTerms + 4 * Tile::kThreads;

  // `scratch`: kFloats.
  __device__ __forceinline__ TileGradients(Shared<float> scratch)
      : lines_(scratch), weights_(scratch + kTerms), packets_(scratch + 2 * kTerms) {}

  // For all threads, which have to wait for each other before; afterwards they have.
  template <typename T>
  __device__ __forceinline__ void Load(const FastArgs<T>& args, const TileRows<Tile>& rows, const BagGradients& from,
                                       const int32_t* plan, int first_column, Shared<float> to) const {
    const RowVectors<Tile, T> vectors(args, first_column);
    const int size = Tile::kCount << (args.log_a + args.log_b);
    StageShort(rows, from, plan);
    __syncthreads();
    bool any_long = false;
    JAX_TT_UNROLL_BY(1)
    for (int i = ThreadHere(); i < rows.rows() << vectors.log_count(); i += Tile::kThreads) {
      const int row = i >> vectors.log_count(), v = i & ((1 << vectors.log_count()) - 1);
      const int begin = row * kShort, positions = rows.first_place(row + 1) - rows.first_place(row);
      any_long |= positions > kShort;
      if (positions > kShort) continue;
      Columns<4> sum;
      AddTerms<kShort>(
          from.of_bags + vectors.Place(v), args.dim(), begin, begin + positions, [&](int64_t k) { return Staged(k); },
          sum);
      vectors.Store(v, sum, to + row * size);
    }
    if (!__syncthreads_or(any_long)) return;
    for (int row = 0; row < rows.rows(); ++row)
      if (rows.first_place(row + 1) - rows.first_place(row) > kShort)
        AddLong(args, vectors, from, plan, rows.first_place(row), rows.first_place(row + 1), to + row * size);
  }

 private:
  __device__ __forceinline__ Term Staged(int64_t i) const { return {__float_as_int(lines_[i]), weights_[i]}; }
  __device__ __forceinline__ void Stage(int64_t i, const Term& term) const {
    lines_[i] = __int_as_float(term.line);
    weights_[i] = term.weight;
  }

  __device__ __forceinline__ void StageShort(const TileRows<Tile>& rows, const BagGradients& from,
                                             const int32_t* plan) const {
    JAX_TT_UNROLL_BY(2)
    for (int i = ThreadHere(); i < rows.rows() * kShort; i += Tile::kThreads) {
      const int row = i / kShort, place = rows.first_place(row) + i % kShort;
      if (place < rows.first_place(row + 1)) Stage(i, from.TermAt(plan, place));
    }
  }

  template <typename T>
  __device__ __forceinline__ void AddLong(const FastArgs<T>& args, const RowVectors<Tile, T>& vectors,
                                          const BagGradients& from, const int32_t* plan, int begin, int end,
                                          Shared<float> to) const {
    const int thread = ThreadHere(), lanes = 1 << vectors.log_count();
    const int v = thread & (lanes - 1), group = thread >> vectors.log_count();
    const int groups = Tile::kThreads >> vectors.log_count();
    Columns<4> sum;
    for (int base = begin; base < end; base += kStaged) {
      const int count = min(kStaged, end - base), each = (count + groups - 1) / groups;
      JAX_TT_UNROLL
      for (int i = ThreadHere(); i < kStaged; i += Tile::kThreads)
        if (i < count) Stage(i, from.TermAt(plan, base + i));
      __syncthreads();
      AddTerms<kAheadOfLong>(
          from.of_bags + vectors.Place(v), args.dim(), min(group * each, count), min((group + 1) * each, count),
          [&](int64_t k) { return Staged(k); }, sum);
      __syncthreads();
    }
    Store4(packets_ + 4 * thread, MakeFloat4(sum.value));
    __syncthreads();
    if (group == 0) {
      JAX_TT_UNROLL_BY(4)
      for (int other = 1; other < groups; ++other) {
        const float4 packet = Load4(packets_ + 4 * (other * lanes + v));
        JAX_TT_UNROLL
        for (int e = 0; e < 4; ++e) sum.value[e] += Element(packet, e);
      }
      vectors.Store(v, sum, to);
    }
    __syncthreads();
  }

  const Shared<float> lines_, weights_, packets_;
};

}  // namespace jax_tt
