// Launches of the specialised passes; one source for each rank compiles them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ffi/cuda/tt/fast_mma.h"
#include "ffi/cuda/tt/fast_passes.h"
#include "ffi/cuda/tt/fast_rows.h"
#include "ffi/cuda/tt/fast_shares.h"

namespace jax_tt {

namespace fast_internal {

constexpr int64_t kMaxBlocks = int64_t{1} << 20;

// fn(FastTile) with the columns c of a block.
template <int kRank, typename Fn>
auto WithTile(int q, Fn fn) {
  constexpr int kMost = FastPasses<kRank>::kMostColumns;
  if constexpr (kMost > 2)
    if (FastPasses<kRank>::Halves(q)) return fn(FastTile<kRank, kMost / 2>());
  return fn(FastTile<kRank, kMost>());
}

using Float32Math = Mma<SplitOperands>;

// fn(Math) of a table: float32 with all its bits or as TF32, bfloat16 as it is, float16 as TF32, since the gradients of
// products may be beyond its range.
template <typename T, typename Fn>
auto WithMath(bool tf32, Fn fn) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return fn(Mma<Bfloat16Operands>());
  } else if constexpr (std::is_same_v<T, float16>) {
    return fn(Mma<TF32Operands>());
  } else {
    return tf32 ? fn(Mma<TF32Operands>()) : fn(Float32Math());
  }
}

}  // namespace fast_internal

template <int kRank>
size_t FastPasses<kRank>::SharedBytes(int q) {
  return fast_internal::WithTile<kRank>(q, [](auto tag) {
    using Tile = decltype(tag);
    return jax_tt::SharedBytes<float>(Tile::kRowFloats) +
           std::max(SharesMemory<Tile, fast_internal::Float32Math>::kBytes,
                    SharesMemory<Tile, Mma<Bfloat16Operands>>::kBytes);
  });
}

template <int kRank>
int FastPasses<kRank>::TileRows(int log_a, int log_q, int log_b, bool crowded) {
  return fast_internal::WithTile<kRank>(1 << log_q, [&](auto tag) {
    using Tile = decltype(tag);
    // Shared memory of each of three blocks on a multiprocessor of 228 KiB, 1 KiB of which a block takes beside it, and
    // how many rows make three blocks better than more rows.
    constexpr int64_t kThirdOfShared = 75 << 10;
    constexpr int kEnoughRows = 16;
    const int floats = (kRank << log_b) + (Tile::kCount << (log_a + log_b));
    const int rows = std::min(Tile::kMaxRows, Tile::kRowFloats / floats);
    const int64_t others = SharesMemory<Tile, fast_internal::Float32Math>::kBytes;
    const int of_third = static_cast<int>((kThirdOfShared - others) / 4 / floats);
    const bool takes_third = Tile::kBlocks == 3 && of_third >= kEnoughRows && !crowded;
    return takes_third ? std::min(rows, of_third) : rows;
  });
}

template <int kRank>
template <typename T>
void FastPasses<kRank>::Rows(TableQueue& queue, FastArgs<T> args, float* rows) {
  fast_internal::WithTile<kRank>(args.q(), [&](auto tag) {
    using Tile = decltype(tag);
    const int64_t items = std::clamp<int64_t>(args.max_parts * (args.q() / Tile::kCount), 1, fast_internal::kMaxBlocks);
    fast_internal::WithMath<T>(args.tf32, [&](auto math) {
      using Math = decltype(math);
      using Own = FastRows<T>;
      using Kernel = TableKernelOf<Own, MakeRowsFast<Tile, Math, T, OneTable<Own>>,
                                   MakeRowsFast<Tile, Math, T, ManyTables<Own>>, Tile::kThreads>;
      const size_t shared =
          RowsMemory<Tile, Math>::kBytes + jax_tt::SharedBytes<float>(args.tile_rows * args.right_floats());
      queue.Add(Kernel::kKernel, items, shared, Own{args, rows});
    });
  });
}

template <int kRank>
template <typename T>
void FastPasses<kRank>::Shares(TableQueue& queue, FastShares<T> shares) {
  FastArgs<T>& args = shares.args;
  fast_internal::WithTile<kRank>(args.q(), [&](auto tag) {
    using Tile = decltype(tag);
    const int64_t blocks = std::clamp<int64_t>(args.max_parts, 1, fast_internal::kMaxBlocks);
    fast_internal::WithMath<T>(args.tf32, [&](auto math) {
      using Math = decltype(math);
      using Own = FastShares<T>;
      using Kernel = TableKernelOf<Own, MakeSharesFast<Tile, Math, T, OneTable<Own>>,
                                   MakeSharesFast<Tile, Math, T, ManyTables<Own>>, Tile::kThreads>;
      const size_t shared = SharesMemory<Tile, Math>::kBytes +
                            jax_tt::SharedBytes<float>(args.tile_rows * args.right_floats()) +
                            jax_tt::SharedBytes<float>(args.tile_rows * args.template gradient_floats<Tile>());
      queue.Add(Kernel::kKernel, blocks, shared, shares);
    });
  });
}

#define JAX_TT_INSTANTIATE_FAST(kRank, T)                                  \
  template void FastPasses<kRank>::Rows(TableQueue&, FastArgs<T>, float*); \
  template void FastPasses<kRank>::Shares(TableQueue&, FastShares<T>)
#define JAX_TT_INSTANTIATE_FAST_RANK(kRank)                      \
  template size_t FastPasses<kRank>::SharedBytes(int);           \
  template int FastPasses<kRank>::TileRows(int, int, int, bool); \
  JAX_TT_INSTANTIATE_FAST(kRank, float);                         \
  JAX_TT_INSTANTIATE_FAST(kRank, bfloat16);                      \
  JAX_TT_INSTANTIATE_FAST(kRank, float16)

}  // namespace jax_tt
