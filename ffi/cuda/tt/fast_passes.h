// The specialised passes of one rank, each rank compiled in a source of its own.
#pragma once

#include <stdint.h>

#include "ffi/cuda/tables/queue.h"
#include "ffi/cuda/tt/fast_gradients.h"
#include "ffi/cuda/tt/fast_tile.h"
#include "ffi/cuda/tt/pass.h"

namespace jax_tt {

// What the backward pass is given.
template <typename T>
struct FastShares {
  FastArgs<T> args;
  BagGradients gradients;
  GradientShares shares;
  Cleared cleared;
};

template <int kRank>
struct FastPasses {
  // Columns c of a block, of a slice of q: as many as make 128 columns of the slice, or all, which make 64.
  static constexpr int kMostColumns = 128 / kRank;
  static constexpr bool Halves(int64_t q) { return kMostColumns > 2 && q < kMostColumns; }
  static constexpr int BlockColumns(int64_t q) { return Halves(q) ? kMostColumns / 2 : kMostColumns; }

  // Whether slices of q columns c, for prefixes of `lines` lines each, are divided so: a block has 64 columns or 128,
  // and a prefix at least four lines (w, c) in it.
  static constexpr bool Takes(int64_t q, int64_t lines) { return q >= BlockColumns(q) && lines * BlockColumns(q) >= 4; }

  // The most shared memory that a block takes, for slices of q columns c.
  static size_t SharedBytes(int q);
  // The most rows of a tile, of factors as FastArgs has them.  `crowded`: most prefixes have several rows, so that
  // memory for rows limits the tile.
  static int TileRows(int log_a, int log_q, int log_b, bool crowded);

  template <typename T>
  static void Rows(TableQueue& queue, FastArgs<T> args, float* rows);
  template <typename T>
  static void Shares(TableQueue& queue, FastShares<T> shares);
};

}  // namespace jax_tt
