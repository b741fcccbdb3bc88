#include <algorithm>
#include <type_traits>

#include "ffi/cuda/tt_fast.h"
#include "ffi/cuda/tt_pass.h"
#include "ffi/cuda/tt_products.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxTile = 32;
// A tile must leave room for a second block on the smallest of the GPUs we build for (99 KiB a block, 100 an SM).
constexpr int64_t kSharedFloats = (int64_t{48} << 10) / 4;
constexpr int64_t kMaxSharedFloats = (int64_t{96} << 10) / 4;
constexpr int64_t kGlobalFloats = (int64_t{64} << 20) / 4;
constexpr int64_t kMaxBlocks = 1056;  // eight for each multiprocessor of an H200

// The places of a tile's matrices, in floats.
struct TileLayout {
  int64_t slice, left, right, product, gradient, product_gradient, chain[2], size;
  __host__ __device__ TileLayout(const TTShape& shape, const Pivot& pivot, int64_t rows, bool backward) {
    int64_t place = 0;
    const auto take = [&](int64_t floats) {
      const int64_t start = place;
      place += (floats + 3) / 4 * 4;
      return start;
    };
    slice = take(pivot.slice_size());
    left = take(rows * pivot.left_size());
    right = take(rows * pivot.right_size());
    product = take(rows * pivot.product_size());
    gradient = take(backward ? rows * pivot.a * pivot.q * pivot.b : 0);
    product_gradient = take(backward ? rows * pivot.product_size() : 0);
    // Products on the way to a side of several cores; the last one is the side itself.
    int64_t longest = 0, width = 1;
    for (int k = 0; k + 1 < pivot.core; ++k) {
      width *= shape.q[k];
      longest = longest > width * shape.r[k + 1] ? longest : width * shape.r[k + 1];
    }
    width = 1;
    for (int k = shape.d - 1; k - 1 > pivot.core; --k) {
      width *= shape.q[k];
      longest = longest > width * shape.r[k] ? longest : width * shape.r[k];
    }
    chain[0] = take(rows * longest);
    chain[1] = take(rows * longest);
    size = place;
  }
};

PassPlan MakePassPlan(const TTShape& shape, const CudaPlan& layout, int core, bool backward) {
  const Pivot pivot = MakePivot(shape, core);
  const auto floats = [&](int64_t rows) { return TileLayout(shape, pivot, rows, backward).size; };
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
struct PassArgs {
  TTArgs<T> table;
  Pivot pivot;
  RowChunk chunk;
  PassPlan plan;
  float* workspace;
};

// One block's tile; Memory is shared memory or workspace.
template <typename T, typename Memory>
class Tile {
 public:
  __device__ Tile(const PassArgs<T>& args, Memory memory, Shared<int32_t> rows, bool backward)
      : args_(args),
        plan_(args.table.plan.get()),
        memory_(memory),
        rows_(rows),
        place_(args.table.shape, args.pivot, args.plan.tile_rows, backward) {}

  // fn(part, first tile) for every tile of this block's parts, with its slice, left and right sides in place.
  template <typename Fn>
  __device__ void ForEach(Fn fn) {
    const CudaPlan& layout = args_.table.layout;
    const int core = args_.pivot.core;
    const int64_t parts = plan_[CudaPlan::kParts + core];
    for (int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
      const int64_t slice = plan_[layout.part_slice(core) + part];
      const int32_t* segment = plan_ + layout.segment(core) + slice;
      const int64_t part_rows = layout.part_rows[core];
      const int64_t begin = segment[0] + (part - plan_[layout.first_part(core) + slice]) * part_rows;
      const int64_t end = min(static_cast<int64_t>(segment[1]), begin + part_rows);
      const T* stored = args_.table.cores[core] + slice * args_.pivot.slice_size();
      for (int64_t i = threadIdx.x; i < args_.pivot.slice_size(); i += kThreads)
        memory_[place_.slice + i] = ToCompute(stored[i]);
      for (int64_t first = begin; first < end; first += args_.plan.tile_rows) {
        // A part that lies in another chunk only has its share cleared.
        if (!ReadRows(first, end) && first != begin) continue;
        FillSide(/*left=*/true);
        FillSide(/*left=*/false);
        fn(part, first == begin);
        __syncthreads();
      }
    }
  }

  // The rows of the tile, -1 where there is none.
  __device__ int64_t row(int64_t t) const { return rows_[t]; }
  __device__ int64_t size() const { return args_.plan.tile_rows; }

  __device__ auto Slice() const { return memory_ + place_.slice; }
  __device__ auto Left() const { return memory_ + place_.left; }
  __device__ auto Right() const { return memory_ + place_.right; }
  __device__ auto Product() const { return memory_ + place_.product; }
  __device__ auto Gradient() const { return memory_ + place_.gradient; }
  __device__ auto ProductGradient() const { return memory_ + place_.product_gradient; }

  // L G or G R, whichever is made first.
  __device__ void MakeProduct() {
    const Pivot& p = args_.pivot;
    if (p.left_first)
      Products({size(), p.a, p.q * p.r_right, p.r_left}, MakeMatrices(Left(), p.left_size(), p.r_left, 1),
               MakeMatrices(Slice(), 0, p.q * p.r_right, 1),
               MakeMatrices(Product(), p.product_size(), p.q * p.r_right, 1));
    else
      Products({size(), p.r_left * p.q, p.b, p.r_right}, MakeMatrices(Slice(), 0, p.r_right, 1),
               MakeMatrices(Right(), p.right_size(), p.b, 1), MakeMatrices(Product(), p.product_size(), p.b, 1));
  }

 private:
  // Whether the tile has any row of this chunk.
  __device__ bool ReadRows(int64_t first, int64_t end) {
    const CudaPlan& layout = args_.table.layout;
    const int core = args_.pivot.core;
    bool any = false;
    for (int64_t t = threadIdx.x; t < size(); t += kThreads) {
      int64_t row = -1;
      if (first + t < end)
        row = core == layout.main ? first + t : plan_[layout.row_head() + plan_[layout.list(core) + first + t]];
      const bool here = args_.chunk.holds(row);
      rows_[t] = static_cast<int32_t>(here ? row : -1);
      any |= here;
    }
    return __syncthreads_or(any);
  }

  __device__ const T* RowSlice(int core, int64_t row) const {
    const TTShape& shape = args_.table.shape;
    return args_.table.cores[core] + plan_[args_.table.layout.row_digit(core) + row] * shape.slice_size(core);
  }

  // The product of the cores on one side of the pivot, for every row of the tile; zeros where there is no row.
  __device__ void FillSide(bool left) {
    const TTShape& shape = args_.table.shape;
    const int outer = left ? 0 : shape.d - 1, step = left ? 1 : -1, pivot = args_.pivot.core;
    const Memory side = left ? Left() : Right();
    if (outer == pivot) {
      for (int64_t t = threadIdx.x; t < size(); t += kThreads) side[t] = rows_[t] < 0 ? 0.0f : 1.0f;
      __syncthreads();
      return;
    }
    Memory in = outer + step == pivot ? side : memory_ + place_.chain[0];
    const int64_t outer_size = shape.slice_size(outer);
    for (int64_t e = threadIdx.x; e < size() * outer_size; e += kThreads) {
      const int64_t row = rows_[e / outer_size];
      in[e] = row < 0 ? 0.0f : ToCompute(RowSlice(outer, row)[e % outer_size]);
    }
    __syncthreads();
    int64_t width = shape.q[outer];
    for (int core = outer + step, turn = 1; core != pivot; core += step, turn ^= 1) {
      const bool last = core + step == pivot;
      const Memory out = last ? side : memory_ + place_.chain[turn];
      Extend(core, left, width, in, out);
      __syncthreads();
      in = out;
      width *= shape.q[core];
    }
  }

  // out = in slice from the left, [width, r] [r, q r']; slice in from the right, [r q, r'] [r', width].
  __device__ void Extend(int core, bool left, int64_t width, Memory in, Memory out) {
    const TTShape& shape = args_.table.shape;
    const int64_t r = shape.r[core], q = shape.q[core], next = shape.r[core + 1];
    const int64_t rows = left ? width : r * q, columns = left ? q * next : width, inner = left ? r : next;
    for (int64_t e = threadIdx.x; e < size() * rows * columns; e += kThreads) {
      const int64_t t = e / (rows * columns), i = e / columns % rows, j = e % columns;
      const int64_t row = rows_[t];
      float sum = 0;
      if (row >= 0) {
        const T* slice = RowSlice(core, row);
        for (int64_t k = 0; k < inner; ++k)
          sum = left ? fmaf(in[(t * width + i) * r + k], ToCompute(slice[k * columns + j]), sum)
                     : fmaf(ToCompute(slice[i * next + k]), in[(t * next + k) * width + j], sum);
      }
      out[e] = sum;
    }
  }

  const PassArgs<T>& args_;
  const int32_t* plan_;
  Memory memory_;
  Shared<int32_t> rows_;
  const TileLayout place_;
};

// Calls fn with the memory of this block's tile.
template <bool kInShared, typename T, typename Fn>
__device__ void WithTile(const PassArgs<T>& args, bool backward, Fn fn) {
  SharedArena arena;
  const Shared<int32_t> rows = arena.Take<int32_t>(kMaxTile);
  if constexpr (kInShared) {
    Tile<T, Shared<float>> tile(args, arena.Take<float>(args.plan.tile_floats), rows, backward);
    fn(tile);
  } else {
    Tile<T, float*> tile(args, args.workspace + blockIdx.x * args.plan.tile_floats, rows, backward);
    fn(tile);
  }
}

template <typename T, bool kInShared>
__global__ void __launch_bounds__(kThreads) MakeRows(const __grid_constant__ PassArgs<T> args, float* rows) {
  WithTile<kInShared>(args, /*backward=*/false, [&](auto& tile) {
    const Pivot& p = args.pivot;
    const int64_t dim = p.a * p.q * p.b;
    tile.ForEach([&](int64_t, bool) {
      tile.MakeProduct();
      __syncthreads();
      const int64_t columns = p.left_first ? p.b : p.q * p.b, inner = p.left_first ? p.r_right : p.r_left;
      for (int64_t e = threadIdx.x; e < tile.size() * dim; e += kThreads) {
        const int64_t t = e / dim, i = e % dim / columns, j = e % columns;
        if (tile.row(t) < 0) continue;
        float sum = 0;
        for (int64_t k = 0; k < inner; ++k)
          sum = p.left_first ? fmaf(tile.Product()[t * p.product_size() + i * inner + k],
                                    tile.Right()[t * p.right_size() + k * columns + j], sum)
                             : fmaf(tile.Left()[t * p.left_size() + i * inner + k],
                                    tile.Product()[t * p.product_size() + k * columns + j], sum);
        rows[(tile.row(t) - args.chunk.begin) * dim + e % dim] = sum;
      }
    });
  });
}

template <typename T, bool kInShared>
__global__ void __launch_bounds__(kThreads)
    MakeShares(const __grid_constant__ PassArgs<T> args, const float* row_gradients,
               const __grid_constant__ GradientShares shares) {
  WithTile<kInShared>(args, /*backward=*/true, [&](auto& tile) {
    const Pivot& p = args.pivot;
    const int64_t dim = p.a * p.q * p.b, qr = p.q * p.r_right, qb = p.q * p.b;
    // One share per row of the tile, written where the row stands in the chunk.
    const auto row_product = [&](float* out, const ProductSize& size, const auto& a, const auto& b) {
      for (int64_t e = threadIdx.x; e < size.stack * size.rows * size.columns; e += kThreads) {
        const int64_t j = e % size.columns, i = e / size.columns % size.rows, t = e / (size.columns * size.rows);
        if (tile.row(t) < 0) continue;
        float sum = 0;
        for (int64_t k = 0; k < size.inner; ++k) sum = fmaf(a.at(t, i, k), b.at(t, k, j), sum);
        out[(tile.row(t) - args.chunk.begin) * size.rows * size.columns + i * size.columns + j] = sum;
      }
    };
    tile.ForEach([&](int64_t part, bool first) {
      const int64_t rows = tile.size();
      for (int64_t e = threadIdx.x; e < rows * dim; e += kThreads) {
        const int64_t row = tile.row(e / dim);
        tile.Gradient()[e] = row < 0 ? 0.0f : row_gradients[(row - args.chunk.begin) * dim + e % dim];
      }
      tile.MakeProduct();
      __syncthreads();
      const auto right_t = MakeMatrices(tile.Right(), p.right_size(), 1, p.b);
      float* slice = shares.slice + part * p.slice_size();
      if (p.left_first) {
        const auto g = MakeMatrices(tile.Gradient(), dim, p.b, 1);
        const auto d_product = MakeMatrices(tile.ProductGradient(), p.product_size(), p.r_right, 1);
        Products({rows, p.a * p.q, p.r_right, p.b}, g, right_t, d_product);
        __syncthreads();
        if (shares.right != nullptr)
          row_product(shares.right, {rows, p.r_right, p.b, p.a * p.q},
                      MakeMatrices(tile.Product(), p.product_size(), 1, p.r_right), g);
        if (shares.left != nullptr)
          row_product(shares.left, {rows, p.a, p.r_left, qr},
                      MakeMatrices(tile.ProductGradient(), p.product_size(), qr, 1),
                      MakeMatrices(tile.Slice(), 0, 1, qr));
        SumOfProducts({rows, p.r_left, qr, p.a}, MakeMatrices(tile.Left(), p.left_size(), 1, p.r_left),
                      MakeMatrices(tile.ProductGradient(), p.product_size(), qr, 1), MakeMatrices(slice, 0, qr, 1),
                      first);
      } else {
        const auto g = MakeMatrices(tile.Gradient(), dim, qb, 1);
        Products({rows, p.r_left, qb, p.a}, MakeMatrices(tile.Left(), p.left_size(), 1, p.r_left), g,
                 MakeMatrices(tile.ProductGradient(), p.product_size(), qb, 1));
        __syncthreads();
        if (shares.left != nullptr)
          row_product(shares.left, {rows, p.a, p.r_left, qb}, g, MakeMatrices(tile.Product(), p.product_size(), 1, qb));
        if (shares.right != nullptr)
          row_product(shares.right, {rows, p.r_right, p.b, p.r_left * p.q}, MakeMatrices(tile.Slice(), 0, 1, p.r_right),
                      MakeMatrices(tile.ProductGradient(), p.product_size(), p.b, 1));
        SumOfProducts({rows, p.r_left * p.q, p.r_right, p.b},
                      MakeMatrices(tile.ProductGradient(), p.product_size(), p.b, 1), right_t,
                      MakeMatrices(slice, 0, p.r_right, 1), first);
      }
    });
  });
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

template <typename T>
Status RowsPass(cudaStream_t stream, const TTArgs<T>& args, const RowChunk& chunk, float* rows, float* workspace) {
  if (HasFastPass(args.shape, MakePivot(args.shape, args.layout.main))) return FastRowsPass(stream, args, chunk, rows);
  const PassPlan plan = PlanForward(args.shape, args.layout);
  const PassArgs<T> pass{args, MakePivot(args.shape, args.layout.main), chunk, plan, workspace};
  return Launch(stream, plan.blocks, kThreads, SharedForTile(plan),
                plan.in_shared ? MakeRows<T, true> : MakeRows<T, false>, pass, rows);
}

template <typename T>
Status GradientPass(cudaStream_t stream, const TTArgs<T>& args, int pivot, const RowChunk& chunk,
                    const float* row_gradients, const GradientShares& shares, float* workspace) {
  if (HasFastPass(args.shape, MakePivot(args.shape, pivot)))
    return FastGradientPass(stream, args, chunk, row_gradients, shares);
  const PassPlan plan = PlanBackward(args.shape, args.layout, pivot);
  const PassArgs<T> pass{args, MakePivot(args.shape, pivot), chunk, plan, workspace};
  return Launch(stream, plan.blocks, kThreads, SharedForTile(plan),
                plan.in_shared ? MakeShares<T, true> : MakeShares<T, false>, pass, row_gradients, shares);
}

#define JAX_TT_INSTANTIATE(T)                                                                      \
  template Status RowsPass(cudaStream_t, const TTArgs<T>&, const RowChunk&, float*, float*);       \
  template Status GradientPass(cudaStream_t, const TTArgs<T>&, int, const RowChunk&, const float*, \
                               const GradientShares&, float*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
