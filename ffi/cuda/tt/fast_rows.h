// The specialised forward pass: rows of the table from tiles.
#pragma once

#include "ffi/cuda/tables/list.h"
#include "ffi/cuda/tt/fast_lanes.h"
#include "ffi/cuda/tt/fast_tile.h"

namespace jax_tt {

template <typename Tile, typename Math>
struct RowsMemory {
  using Operand = typename Math::Operand;
  using At = typename Math::template Lead<Tile>;
  Shared<int32_t> rows;
  Shared<Operand> slice, left;
  Shared<float> product, right;

  template <typename T>
  __device__ __forceinline__ explicit RowsMemory(const FastArgs<T>& args) {
    SharedArena arena;
    rows = arena.Take<int32_t>(TileRows<Tile>::kWords);
    slice = arena.Take<Operand>(Tile::kRank * At::kColumns);
    left = arena.Take<Operand>(Tile::kLines * At::kLeft);
    product = arena.Take<float>(Tile::kLines * At::kColumns);
    right = arena.Take<float>(args.tile_rows * args.right_floats());
  }
  // Without the right sides of rows.
  static constexpr size_t kBytes =
      SharedBytes<int32_t>(TileRows<Tile>::kWords) + SharedBytes<Operand>(Tile::kRank * At::kColumns) +
      SharedBytes<Operand>(Tile::kLines * At::kLeft) + SharedBytes<float>(Tile::kLines * At::kColumns);
};

// out = X R for every row of the tile, kJ of the b columns at a time.
//
// A thread has four values s of four lines (w, c) of X in registers and goes through the rows of their prefix; the
// lanes that have the other values of s add up with it.
template <int kJ, typename Tile, typename Math, typename T>
__device__ __forceinline__ void FinishRows(const FastArgs<T>& args, const RowsMemory<Tile, Math>& memory,
                                           const TileRows<Tile>& rows, int first_column, float* out) {
  constexpr int kLanes = Tile::kRank / 4, kAtOnce = 32 / kLanes;
  const int s = threadIdx.x % kLanes, log_groups = args.log_a + Log2(Tile::kCount) - 2;
  const int count = rows.prefixes() << log_groups;
  for (int base = threadIdx.x / 32 * kAtOnce; base < count; base += Tile::kWarps * kAtOnce) {
    const int item = base + threadIdx.x % 32 / kLanes;
    const bool works = item < count;
    const int prefix = works ? item >> log_groups : 0, group = item & ((1 << log_groups) - 1);
    int row = works ? rows.first_row(prefix) : 0;
    const int end = works ? rows.first_row(prefix + 1) : 0;
    float4 x[4];
    JAX_TT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int line = group * 4 + i, w = line / Tile::kCount, c = line % Tile::kCount;
      x[i] = Load4(memory.product +
                   ((((prefix << args.log_a) + w) * RowsMemory<Tile, Math>::At::kColumns) + c * Tile::kRank + s * 4));
    }
    JAX_TT_UNROLL_BY(1)
    for (; __any_sync(kAllLanes, row < end); ++row) {
      JAX_TT_UNROLL_BY(1)
      for (int j = 0; j < args.b(); j += kJ) {
        const Shared<const float> right =
            memory.right + ((((row < end ? row : 0) << args.log_b) + j) * Tile::kRank + s * 4);
        float sums[4 * kJ];
        JAX_TT_UNROLL
        for (int t = 0; t < kJ; ++t) {
          const float4 r = Load4(right + t * Tile::kRank);
          JAX_TT_UNROLL
          for (int i = 0; i < 4; ++i) sums[i * kJ + t] = AddDot(x[i], r, 0.0f);
        }
        ScatterSums<4 * kJ, kLanes, 1>(sums, s);
        constexpr int kKept = kScattered<4 * kJ, kLanes>, kSame = kLanes > 4 * kJ ? kLanes / (4 * kJ) : 1;
        if (row < end && s % kSame == 0) {
          const int first = s * (4 * kJ) / kLanes;
          float* to = out + static_cast<int64_t>(row) * args.dim();
          JAX_TT_UNROLL
          for (int i = 0; i < kKept; ++i) {
            const int line = group * 4 + (first + i) / kJ, w = line / Tile::kCount, c = line % Tile::kCount;
            to[args.RowPlace(w, first_column + c, j + (first + i) % kJ, args.mirrored)] = sums[i];
          }
        }
      }
    }
  }
}

template <typename T>
struct FastRows {
  FastArgs<T> args;
  float* out;
};

// A block makes a block of columns of a part at a time.
template <typename Tile, typename Math, typename T, typename Tables>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) MakeRowsFast(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  typename Tables::Held own = tables.Find(&block);
  const FastArgs<T>& args = own.args;
  const RowsMemory<Tile, Math> memory(args);
  TileRows<Tile> rows(memory.rows);
  const int32_t* plan = args.plan.get();
  const int column_blocks = args.q() / Tile::kCount;
  const int64_t items = args.max_parts * column_blocks;
  for (int64_t item = block.index; item < items; item += block.count) {
    const FastPart part(args, plan, item / column_blocks);
    const int first_column = static_cast<int>(item % column_blocks) * Tile::kCount;
    if (part.begin >= part.end) continue;
    WithMirror(args,
               [&](auto mirrored) { LoadSlice<mirrored, Tile, Math>(args, part.slice, first_column, memory.slice); });
    for (int64_t first = part.begin; first < part.end;) {
      rows.Find(args, plan, first, part.end);
      __syncthreads();
      WithMirror(args, [&](auto mirrored) {
        LoadLeft<mirrored, Tile, Math>(args, rows, memory.left);
        LoadRight<mirrored>(args, rows, memory.right);
      });
      __syncthreads();
      Math::template MakeProduct<Tile>(memory.left, memory.slice, memory.product);
      __syncthreads();
      float* to = own.out + (first - args.chunk.begin) * args.dim();
      if (args.log_b == 1)
        FinishRows<2>(args, memory, rows, first_column, to);
      else
        FinishRows<4>(args, memory, rows, first_column, to);
      const int taken = rows.rows();
      __syncthreads();
      first += taken;
    }
  }
}

}  // namespace jax_tt
