// Launches of the specialised passes; one source for each rank compiles them.
#ifndef JAX_TT_CUDA_TT_FAST_LAUNCH_H_
#define JAX_TT_CUDA_TT_FAST_LAUNCH_H_

#include <algorithm>
#include <type_traits>

#include "ffi/cuda/tt_fast_fma.h"
#include "ffi/cuda/tt_fast_mma.h"
#include "ffi/cuda/tt_fast_passes.h"
#include "ffi/cuda/tt_fast_rows.h"
#include "ffi/cuda/tt_fast_shares.h"

namespace jax_tt {

namespace fast_internal {

constexpr int64_t kMaxBlocks = int64_t{1} << 20;

// Rows of a tile: as many as there is memory for their right sides and gradients.
template <typename Tile, typename T>
void SetTileRows(FastArgs<T>& args) {
  args.tile_rows = std::min({Tile::kMaxRows, Tile::kRightFloats / (Tile::kRank << args.log_b),
                             Tile::kGradientFloats / (Tile::kCount << (args.log_a + args.log_b))});
}

// fn(FastTile) with the columns c of a block.
template <int kRank, typename Fn>
auto WithTile(int q, Fn fn) {
  constexpr int kMost = FastPasses<kRank>::kMostColumns;
  if constexpr (kMost > 2)
    if (FastPasses<kRank>::Halves(q)) return fn(FastTile<kRank, kMost / 2>());
  return fn(FastTile<kRank, kMost>());
}

// fn(Math) of a table: float32 by multiply-adds or as TF32, bfloat16 as it is, float16 as TF32, since the gradients of
// products may be beyond its range.
template <typename T, typename Fn>
auto WithMath(bool tf32, Fn fn) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return fn(Mma<Bfloat16Operands>());
  } else if constexpr (std::is_same_v<T, float16>) {
    return fn(Mma<TF32Operands>());
  } else {
    return tf32 ? fn(Mma<TF32Operands>()) : fn(Fma());
  }
}

}  // namespace fast_internal

template <int kRank>
size_t FastPasses<kRank>::SharedBytes(int q) {
  return fast_internal::WithTile<kRank>(q, [](auto tag) {
    using Tile = decltype(tag);
    return std::max({RowsMemory<Tile, Fma>::kBytes, SharesMemory<Tile, Fma>::kBytes,
                     SharesMemory<Tile, Mma<TF32Operands>>::kBytes, SharesMemory<Tile, Mma<Bfloat16Operands>>::kBytes});
  });
}

template <int kRank>
template <typename T>
void FastPasses<kRank>::Rows(TableQueue& queue, FastArgs<T> args, float* rows) {
  fast_internal::WithTile<kRank>(args.q(), [&](auto tag) {
    using Tile = decltype(tag);
    fast_internal::SetTileRows<Tile>(args);
    const int64_t items = std::clamp<int64_t>(args.max_parts * (args.q() / Tile::kCount), 1, fast_internal::kMaxBlocks);
    fast_internal::WithMath<T>(args.tf32, [&](auto math) {
      using Math = decltype(math);
      using Own = FastRows<T>;
      using Kernel = TableKernelOf<Own, MakeRowsFast<Tile, Math, T, OneTable<Own>>,
                                   MakeRowsFast<Tile, Math, T, ManyTables<Own>>, Tile::kThreads>;
      queue.Add(Kernel::kKernel, items, RowsMemory<Tile, Math>::kBytes, Own{args, rows});
    });
  });
}

template <int kRank>
template <typename T>
void FastPasses<kRank>::Shares(TableQueue& queue, FastArgs<T> args, const float* row_gradients,
                               const GradientShares& shares) {
  fast_internal::WithTile<kRank>(args.q(), [&](auto tag) {
    using Tile = decltype(tag);
    fast_internal::SetTileRows<Tile>(args);
    const int64_t blocks = std::clamp<int64_t>(args.max_parts, 1, fast_internal::kMaxBlocks);
    fast_internal::WithMath<T>(args.tf32, [&](auto math) {
      using Math = decltype(math);
      using Own = FastShares<T>;
      using Kernel = TableKernelOf<Own, MakeSharesFast<Tile, Math, T, OneTable<Own>>,
                                   MakeSharesFast<Tile, Math, T, ManyTables<Own>>, Tile::kThreads>;
      queue.Add(Kernel::kKernel, blocks, SharesMemory<Tile, Math>::kBytes, Own{args, row_gradients, shares});
    });
  });
}

#define JAX_TT_INSTANTIATE_FAST(kRank, T)                                  \
  template void FastPasses<kRank>::Rows(TableQueue&, FastArgs<T>, float*); \
  template void FastPasses<kRank>::Shares(TableQueue&, FastArgs<T>, const float*, const GradientShares&)
#define JAX_TT_INSTANTIATE_FAST_RANK(kRank)            \
  template size_t FastPasses<kRank>::SharedBytes(int); \
  JAX_TT_INSTANTIATE_FAST(kRank, float);               \
  JAX_TT_INSTANTIATE_FAST(kRank, bfloat16);            \
  JAX_TT_INSTANTIATE_FAST(kRank, float16)

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_FAST_LAUNCH_H_
