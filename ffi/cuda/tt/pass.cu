#include <algorithm>
#include <optional>
#include <string>

#include "ffi/cuda/tt/fast.h"
#include "ffi/cuda/tt/pass.h"
#include "ffi/cuda/tt/tile.h"

namespace jax_tt {
namespace {

constexpr int kThreads = kPassThreads;
// A tile must leave room for a second block on the smallest of the GPUs we build for (99 KiB a block, 100 an SM).
constexpr int64_t kSharedFloats = (int64_t{48} << 10) / 4;
constexpr int64_t kMaxSharedFloats = (int64_t{96} << 10) / 4;
constexpr int64_t kGlobalFloats = (int64_t{64} << 20) / 4;
constexpr int64_t kMaxBlocks = 1056;  // eight for each multiprocessor of an H200

PassPlan MakePassPlan(const TTShape& shape, const CudaPlan& layout, int core, bool backward) {
  const Pivot pivot = MakePivot(shape, core);
  const auto floats = [&](int64_t rows) {
    int64_t size = 0;
    TileLayout(shape, pivot, rows, backward, &size);
    return size;
  };
  PassPlan plan;
  plan.blocks = std::clamp<int64_t>(layout.max_parts[core], 1, kMaxBlocks);
  int64_t rows = kMaxTile;
  while (rows > 4 && floats(rows) > kSharedFloats) rows /= 2;
  while (rows > 1 && floats(rows) > kMaxSharedFloats) rows /= 2;
  plan.tile_rows = static_cast<int>(rows);
  plan.tile_floats = floats(rows);
  plan.in_shared = plan.tile_floats <= kMaxSharedFloats;
  if (!plan.in_shared) plan.blocks = std::clamp<int64_t>(kGlobalFloats / plan.tile_floats, 1, plan.blocks);
  return plan;
}

template <typename T>
struct RowsArgs {
  PassArgs<T> pass;
  float* rows;
};

template <typename T>
struct SharesArgs {
  PassArgs<T> pass;
  const float* row_gradients;
  GradientShares shares;
};

template <typename T, bool kInShared, typename Tables>
__global__ void __launch_bounds__(kThreads, 3) MakeRows(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const RowsArgs<T>& own = tables.FindInPlace(&block);
  const PassArgs<T>& args = own.pass;
  WithTile<kInShared>(args, block, [&](auto& tile) {
    const TileLayout& p = args.tile;
    const auto make = [&](int64_t, bool) {
      tile.MakeProduct();
      __syncthreads();
      const int columns = p.left_first ? p.b : p.q * p.b;
      const auto store = [&](int t, int i, int j, float value) {
        if (tile.row(t) >= 0) own.rows[(tile.row(t) - args.chunk.begin) * p.dim + i * columns + j] = value;
      };
      if (p.left_first)
        Products({tile.size(), p.a * p.q, p.b, p.r_right}, MakeMatrices(tile.Product(), p.product_size, p.r_right, 1),
                 MakeMatrices(tile.Right(), p.right_size, p.b, 1), store);
      else
        Products({tile.size(), p.a, p.q * p.b, p.r_left}, MakeMatrices(tile.Left(), p.left_size, p.r_left, 1),
                 MakeMatrices(tile.Product(), p.product_size, p.q * p.b, 1), store);
    };
    tile.ForEach(make, [](int64_t) {});
  });
}

template <typename T, bool kInShared, typename Tables>
__global__ void __launch_bounds__(kThreads, 2) MakeShares(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const SharesArgs<T>& own = tables.FindInPlace(&block);
  const PassArgs<T>& args = own.pass;
  const GradientShares& shares = own.shares;
  WithTile<kInShared>(args, block, [&](auto& tile) {
    const TileLayout& p = args.tile;
    const int qr = p.q * p.r_right, qb = p.q * p.b;
    // One share per row of the tile, written where the row stands in the chunk.
    const auto row_product = [&](float* out, const ProductSize& size, const auto& a, const auto& b) {
      Products(size, a, b, [&](int t, int i, int j, float value) {
        if (tile.row(t) < 0) return;
        out[(tile.row(t) - args.chunk.begin) * (size.rows * size.columns) + i * size.columns + j] = value;
      });
    };
    const auto make = [&](int64_t part, bool first) {
      const int rows = tile.size();
      for (int e = threadIdx.x; e < rows * p.dim; e += kThreads) {
        const int t = e / p.dim;
        const int64_t row = tile.row(t);
        tile.Gradient()[e] = row < 0 ? 0.0f : own.row_gradients[(row - args.chunk.begin) * p.dim + (e - t * p.dim)];
      }
      tile.MakeProduct();
      __syncthreads();
      const auto right_t = MakeMatrices(tile.Right(), p.right_size, 1, p.b);
      float* slice = shares.slice + part * p.slice_size;
      if (p.left_first) {
        const auto g = MakeMatrices(tile.Gradient(), p.dim, p.b, 1);
        const auto d_product = MakeMatrices(tile.ProductGradient(), p.product_size, p.r_right, 1);
        Products({rows, p.a * p.q, p.r_right, p.b}, g, right_t, d_product);
        __syncthreads();
        if (shares.right != nullptr)
          row_product(shares.right, {rows, p.r_right, p.b, p.a * p.q},
                      MakeMatrices(tile.Product(), p.product_size, 1, p.r_right), g);
        if (shares.left != nullptr)
          row_product(shares.left, {rows, p.a, p.r_left, qr},
                      MakeMatrices(tile.ProductGradient(), p.product_size, qr, 1),
                      MakeMatrices(tile.Slice(), 0, 1, qr));
        SumOfProducts({rows, p.r_left, qr, p.a}, MakeMatrices(tile.Left(), p.left_size, 1, p.r_left),
                      MakeMatrices(tile.ProductGradient(), p.product_size, qr, 1), MakeMatrices(slice, 0, qr, 1),
                      first);
      } else {
        const auto g = MakeMatrices(tile.Gradient(), p.dim, qb, 1);
        Products({rows, p.r_left, qb, p.a}, MakeMatrices(tile.Left(), p.left_size, 1, p.r_left), g,
                 MakeMatrices(tile.ProductGradient(), p.product_size, qb, 1));
        __syncthreads();
        if (shares.left != nullptr)
          row_product(shares.left, {rows, p.a, p.r_left, qb}, g, MakeMatrices(tile.Product(), p.product_size, 1, qb));
        if (shares.right != nullptr)
          row_product(shares.right, {rows, p.r_right, p.b, p.r_left * p.q}, MakeMatrices(tile.Slice(), 0, 1, p.r_right),
                      MakeMatrices(tile.ProductGradient(), p.product_size, p.b, 1));
        SumOfProducts({rows, p.r_left * p.q, p.r_right, p.b},
                      MakeMatrices(tile.ProductGradient(), p.product_size, p.b, 1), right_t,
                      MakeMatrices(slice, 0, p.r_right, 1), first);
      }
    };
    // The shares of parts that lie in another chunk are added up like the others.
    tile.ForEach(make, [&](int64_t part) {
      for (int e = threadIdx.x; e < p.slice_size; e += kThreads) shares.slice[part * p.slice_size + e] = 0;
    });
  });
}

// Tiles that do not fit in shared memory are rare, so that one kernel for both lists will do.  It is not used for the
// others: in it, the arguments and the cores are memory of an unknown kind, and are read again after every write.
template <typename T, bool kInShared>
constexpr TableKernel RowsKernel() {
  using Own = RowsArgs<T>;
  if constexpr (kInShared)
    return TableKernelOf<Own, MakeRows<T, true, OneTable<Own>>, MakeRows<T, true, ManyTables<Own>>, kThreads>::kKernel;
  else
    return ListKernelOf<Own, MakeRows<T, false, TableList<Own>>, kThreads>::kKernel;
}

template <typename T, bool kInShared>
constexpr TableKernel SharesKernel() {
  using Own = SharesArgs<T>;
  if constexpr (kInShared)
    return TableKernelOf<Own, MakeShares<T, true, OneTable<Own>>, MakeShares<T, true, ManyTables<Own>>,
                         kThreads>::kKernel;
  else
    return ListKernelOf<Own, MakeShares<T, false, TableList<Own>>, kThreads>::kKernel;
}

size_t SharedForTile(const PassPlan& plan) {
  return SharedBytes<int32_t>(kMaxTile) + SharedBytes<float>(plan.in_shared ? plan.tile_floats : 0);
}

}  // namespace

PassPlan PlanForward(const TTShape& shape, const CudaPlan& layout) {
  return MakePassPlan(shape, layout, layout.main, /*backward=*/false);
}

PassPlan PlanBackward(const TTShape& shape, const CudaPlan& layout, int pivot) {
  return MakePassPlan(shape, layout, pivot, /*backward=*/true);
}

namespace {

template <typename T>
Status MakePass(const TTArgs<T>& args, int core, bool backward, const RowChunk& chunk, const PassPlan& plan,
                float* workspace, std::optional<PassArgs<T>>* pass) {
  // Loops count in 32 bits, and by the threads of a block beyond the end.
  constexpr int64_t kMostFloats = INT32_MAX - kThreads;
  if (plan.tile_floats > kMostFloats)
    return InvalidArgument("a row of this table takes " + std::to_string(plan.tile_floats) +
                           " floats of working memory, expected at most " + std::to_string(kMostFloats) +
                           "; use smaller factors or ranks");
  int64_t size = 0;
  const TileLayout tile(args.shape, MakePivot(args.shape, core), plan.tile_rows, backward, &size);
  pass->emplace(PassArgs<T>{args, core, tile, chunk, plan, workspace});
  return {};
}

}  // namespace

template <typename T>
Status RowsPass(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, float* rows, float* workspace) {
  bool fast = false;
  JAX_TT_RETURN_IF_ERROR(HasFastPass(args.shape, MakePivot(args.shape, args.layout.main), &fast));
  if (fast) return FastRowsPass(queue, args, chunk, rows);
  const PassPlan plan = PlanForward(args.shape, args.layout);
  std::optional<PassArgs<T>> pass;
  JAX_TT_RETURN_IF_ERROR(MakePass(args, args.layout.main, /*backward=*/false, chunk, plan, workspace, &pass));
  queue.Add(plan.in_shared ? RowsKernel<T, true>() : RowsKernel<T, false>(), plan.blocks, SharedForTile(plan),
            RowsArgs<T>{*pass, rows});
  return {};
}

template <typename T>
Status GradientPass(TableQueue& queue, const TTArgs<T>& args, int pivot, const RowChunk& chunk,
                    const float* row_gradients, const GradientShares& shares, float* workspace) {
  const PassPlan plan = PlanBackward(args.shape, args.layout, pivot);
  std::optional<PassArgs<T>> pass;
  JAX_TT_RETURN_IF_ERROR(MakePass(args, pivot, /*backward=*/true, chunk, plan, workspace, &pass));
  queue.Add(plan.in_shared ? SharesKernel<T, true>() : SharesKernel<T, false>(), plan.blocks, SharedForTile(plan),
            SharesArgs<T>{*pass, row_gradients, shares});
  return {};
}

#define JAX_TT_INSTANTIATE(T)                                                                     \
  template Status RowsPass(TableQueue&, const TTArgs<T>&, const RowChunk&, float*, float*);       \
  template Status GradientPass(TableQueue&, const TTArgs<T>&, int, const RowChunk&, const float*, \
                               const GradientShares&, float*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
