// The specialised backward pass: every part's share of the gradient of its slice, every row's of its neighbours'.
#pragma once

#include <type_traits>

#include "ffi/cuda/tables/list.h"
#include "ffi/cuda/tt/fast_gradients.h"
#include "ffi/cuda/tt/fast_lanes.h"
#include "ffi/cuda/tt/fast_passes.h"
#include "ffi/cuda/tt/fast_tile.h"

namespace jax_tt {

template <typename Tile, typename Math>
struct SharesMemory {
  using Operand = typename Math::Operand;
  using At = typename Math::template Lead<Tile>;
  static constexpr int64_t kSlice = Tile::kRank * At::kColumns, kLeft = Tile::kLines * At::kLeft;
  static constexpr int64_t kProduct = Tile::kLines * At::kColumns;
  static constexpr int64_t kProductGradient = Tile::kLines * At::kColumns;
  // Without the sides and gradients of rows.
  static constexpr size_t kBytes = SharedBytes<int32_t>(TileRows<Tile>::kWords) + SharedBytes<Operand>(kSlice) +
                                   SharedBytes<Operand>(kLeft) + SharedBytes<float>(kProduct) +
                                   (Math::kInPlace ? 0 : SharedBytes<Operand>(kProductGradient));
  static_assert(TileGradients<Tile>::kFloats <= kProduct);  // they are made where the product will be
  Shared<int32_t> rows;
  Shared<Operand> slice, left, product_gradient;
  Shared<float> product, right, gradient;

  template <typename T>
  __device__ __forceinline__ explicit SharesMemory(const FastArgs<T>& args) {
    SharedArena arena;
    rows = arena.Take<int32_t>(TileRows<Tile>::kWords);
    slice = arena.Take<Operand>(kSlice);
    left = arena.Take<Operand>(kLeft);
    product = arena.Take<float>(kProduct);
    right = arena.Take<float>(args.tile_rows * args.right_floats());
    gradient = arena.Take<float>(args.tile_rows * args.template gradient_floats<Tile>());
    if constexpr (Math::kInPlace)
      product_gradient = product;
    else
      product_gradient = arena.Take<Operand>(kProductGradient);
  }
};

// From the gradients g of the rows and their product X: of the right sides, X^T g of each row, and of X, the sum of g
// R^T over the rows of a prefix.  kJ of the b columns at a time; kGroups: groups of four lines that a warp has at once.
//
// A thread has four values s of four lines (w, c), of X and of its gradient, and goes through the rows of their prefix.
// `add`: whether the gradients of the right sides have a part already, from another block of columns.
template <int kJ, int kGroups, typename Tile, typename Math, typename T>
__device__ __forceinline__ void RightGradients(const FastArgs<T>& args, const SharesMemory<Tile, Math>& memory,
                                               const TileRows<Tile>& rows, bool add, float* out) {
  using Memory = SharesMemory<Tile, Math>;
  constexpr int kLanes = Tile::kRank / 4, kAtOnce = 32 / (kLanes * kGroups);
  const unsigned thread = ThreadHere();
  const int lane = thread % 32, s = lane % kLanes, own = lane / kLanes % kGroups;
  const int groups = (Tile::kCount << args.log_a) / 4, slots = Tile::kLines >> args.log_a;
  const int prefixes = rows.prefixes();
  JAX_TT_UNROLL_BY(1)
  for (int base = thread / 32 * kAtOnce; base < slots; base += Tile::kWarps * kAtOnce) {
    const int prefix = base + lane / (kLanes * kGroups);
    const int begin = prefix < prefixes ? rows.first_row(prefix) : 0;
    const int end = prefix < prefixes ? rows.first_row(prefix + 1) : 0;
    JAX_TT_UNROLL_BY(1)
    for (int group = own; group < groups; group += kGroups) {
      float4 x[4];
      float dx[4][4] = {};
      JAX_TT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int line = group * 4 + i, w = line / Tile::kCount, c = line % Tile::kCount;
        x[i] = Load4(memory.product + (((prefix << args.log_a) + w) * Memory::At::kColumns + c * Tile::kRank + s * 4));
      }
      JAX_TT_UNROLL_BY(1)
      for (int row = begin; __any_sync(kAllLanes, row < end); ++row) {
        const int at = row < end ? row : 0;
        JAX_TT_UNROLL_BY(1)
        for (int j = 0; j < args.b(); j += kJ) {
          const Shared<const float> right = memory.right + (((at << args.log_b) + j) * Tile::kRank + s * 4);
          const Shared<const float> g = memory.gradient + (((at * groups + group) * 4) << args.log_b) + j;
          float sums[4 * kJ] = {};  // [s, j]
          float values[4][kJ];
          JAX_TT_UNROLL
          for (int i = 0; i < 4; ++i) {
            LoadValues<kJ>(g + (i << args.log_b), values[i]);
            JAX_TT_UNROLL
            for (int t = 0; t < kJ; ++t) {
              values[i][t] = row < end ? values[i][t] : 0.0f;
              JAX_TT_UNROLL
              for (int e = 0; e < 4; ++e) sums[e * kJ + t] = fmaf(Element(x[i], e), values[i][t], sums[e * kJ + t]);
            }
          }
          JAX_TT_UNROLL
          for (int t = 0; t < kJ; ++t) {
            const float4 r = Load4(right + t * Tile::kRank);
            JAX_TT_UNROLL
            for (int i = 0; i < 4; ++i) AddScaled(values[i][t], r, dx[i]);
          }
          ScatterSums<4 * kJ, kGroups, kLanes>(sums, own);
          constexpr int kKept = kScattered<4 * kJ, kGroups>;
          if (row < end) {
            const int first = own * kKept;
            JAX_TT_UNROLL
            for (int i = 0; i < kKept; ++i) {
              const int e = first + i;
              float* to = out + ((static_cast<int64_t>(row) * Tile::kRank) << args.log_b) +
                          args.RightPlace(s * 4 + e / kJ, j + e % kJ, args.mirrored);
              *to = add || group != own ? *to + sums[i] : sums[i];
            }
          }
        }
      }
      JAX_TT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int line = group * 4 + i, w = line / Tile::kCount, c = line % Tile::kCount;
        Math::Store(
            memory.product_gradient + (((prefix << args.log_a) + w) * Memory::At::kColumns + c * Tile::kRank + s * 4),
            MakeFloat4(dx[i]));
      }
    }
  }
}

// Chooses among the above: by b, and by the groups of a slot, of which a warp takes at most as many as it has lanes
// for.
template <typename Tile, typename Math, typename T>
__device__ __forceinline__ void RightGradients(const FastArgs<T>& args, const SharesMemory<Tile, Math>& memory,
                                               const TileRows<Tile>& rows, bool add, float* out) {
  constexpr int kMost = 128 / Tile::kRank;
  const int groups = min((Tile::kCount << args.log_a) / 4, kMost);
  const auto with_groups = [&](auto kJ) {
    constexpr int kValues = decltype(kJ)::value;
    if (groups == kMost) return RightGradients<kValues, kMost>(args, memory, rows, add, out);
    if constexpr (kMost > 1)
      if (groups == kMost / 2) return RightGradients<kValues, kMost / 2>(args, memory, rows, add, out);
    if constexpr (kMost > 2 && Tile::kColumns < 128) RightGradients<kValues, kMost / 4>(args, memory, rows, add, out);
  };
  if (args.log_b == 1)
    with_groups(std::integral_constant<int, 2>());
  else
    with_groups(std::integral_constant<int, 4>());
}

// A block makes the shares of a part, one block of columns after the other.
template <typename Tile, typename Math, typename T, typename Tables>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) MakeSharesFast(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const FastShares<T>& own = tables.Find(&block);  // a copy would not fit in registers
  const FastArgs<T>& args = own.args;
  const GradientShares& shares = own.shares;
  const SharesMemory<Tile, Math> memory(args);
  const TileGradients<Tile> gradients(memory.product);
  TileRows<Tile> rows(memory.rows);
  typename Math::template SliceGradient<Tile> slice_gradient;
  const int32_t* plan = args.plan.get();
  const int slice_size = (Tile::kRank * Tile::kRank) << args.log_q, left_size = Tile::kRank << args.log_a;
  own.cleared.Clear(block);
  const uint32_t step = static_cast<uint32_t>(block.count);
  for (uint32_t index = static_cast<uint32_t>(block.index); index < args.max_parts; index += step) {
    const FastPart part(args, plan, index);
    if (part.slice < 0) continue;
    for (int first_column = 0; first_column < args.q(); first_column += Tile::kCount) {
      const bool add = first_column > 0;
      slice_gradient.Clear();
      if (part.begin < part.end)
        WithMirror(args, [&](auto mirrored) {
          LoadSlice<mirrored, Tile, Math>(args, part.slice, first_column, memory.slice);
        });
      for (int32_t first = part.begin; first < part.end;) {
        const int64_t place = first - args.chunk.begin;  // of the tile in the chunk
        rows.Find(args, plan, first, part.end);
        rows.FindPlaces(args, plan, own.gradients.row_begin, first, part.end);
        __syncthreads();
        WithMirror(args, [&](auto mirrored) {
          LoadLeft<mirrored, Tile, Math>(args, rows, memory.left);
          LoadRight<mirrored>(args, rows, memory.right);
        });
        gradients.Load(args, rows, own.gradients, plan, first_column, memory.gradient);
        Math::template MakeProduct<Tile>(memory.left, memory.slice, memory.product);
        __syncthreads();
        RightGradients(args, memory, rows, add, shares.right + ((place * Tile::kRank) << args.log_b));
        __syncthreads();
        float* left = shares.left + place * left_size;
        const int prefixes = rows.prefixes();
        Math::template LeftGradient<Tile>(memory.product_gradient, memory.slice, [&](int m, int k, float value) {
          const int prefix = m >> args.log_a, w = m & (args.a() - 1);
          if (prefix >= prefixes) return;
          float* to = left + rows.first_row(prefix) * left_size + args.LeftPlace(w, k, args.mirrored);
          *to = add ? *to + value : value;
        });
        // What a prefix gives is its first row's share: the others have none.
        if (!add && prefixes < rows.rows())
          for (int row = threadIdx.x / 32; row < rows.rows(); row += Tile::kWarps)
            if (rows.first_row(rows.prefix(row)) != row)
              for (int e = threadIdx.x % 32; e < left_size; e += 32) left[row * left_size + e] = 0;
        slice_gradient.Add(memory.left, memory.product_gradient);
        first += rows.rows();
        __syncthreads();
      }
      float* to = shares.slice + int64_t{index} * slice_size;
      const auto store = [&](int k, int n, auto values) {
        StoreValues(to + args.SlicePlace(k, first_column + n / Tile::kRank, n % Tile::kRank, args.mirrored), values);
      };
      if (args.mirrored)
        slice_gradient.ForEachDown(store);
      else
        slice_gradient.ForEachAcross(store);
    }
  }
}

}  // namespace jax_tt
