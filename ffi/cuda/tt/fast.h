// Passes around the pivot of three cores for the shapes that people use, on which the general ones spend their time.
//
// Ranks are equal and one of a few; the factors of a row are 2, 4 or 8.  The files, from the call down to the product:
//   fast.{h,cu}           whether a shape has a fast pass; the choice of its rank
//   fast_ranks.h          the list of ranks, from which CMake makes a source for each (fast_rank.cu.in)
//   fast_passes.h         the passes of one rank, as fast.cu calls them
//   fast_launch.h         their launches: which tile, which arithmetic, how many blocks
//   fast_tile.h           the tile: the rows of a block, the prefixes they share, how they come to shared memory
//   fast_gradients.h      the gradients of its rows, from those of bags
//   fast_rows.h           the kernel of the forward pass
//   fast_shares.h         the kernel of the backward pass
//   fast_mma.h, mma.h     the three products of both on tensor cores, as TF32, bfloat16, or float32 in two parts
//   fast_lanes.h          sums over the lanes of a warp, vectors in registers
//   fast_load.h           vector loads and stores, loops that are laid out flat
#pragma once

#include "ffi/common/status.h"
#include "ffi/cuda/pivot.h"
#include "ffi/cuda/tt/args.h"
#include "ffi/cuda/tt/pass.h"

namespace jax_tt {

FastTileSize FastTileOf(const TTShape& shape, const Pivot& pivot, int64_t n);

// Whether there are fast passes for this shape that the device has the shared memory for.
Status HasFastPass(const TTShape& shape, const Pivot& pivot, bool* has);

// As RowsPass, and as GatherRowGradients and GradientPass together; without workspace.
template <typename T>
Status FastRowsPass(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, float* rows);
template <typename T>
Status FastGradientPass(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* out_gradient,
                        const GradientShares& shares, const Cleared& cleared);

}  // namespace jax_tt
