// A tile of the general passes: rows that share one slice of the pivot, the products on both sides of it, and where
// they stand in the memory of a block.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "ffi/cuda/pivot.h"
#include "ffi/cuda/tables/list.h"
#include "ffi/cuda/tt/args.h"
#include "ffi/cuda/tt/pass.h"
#include "ffi/cuda/tt/products.h"

namespace jax_tt {

constexpr int kPassThreads = 256;
constexpr int kMaxTile = 32;

// The matrices around a pivot, and the places of a tile's in its memory, in floats.
struct TileLayout {
  int a, r_left, q, r_right, b;
  bool left_first;
  int slice_size, left_size, right_size, product_size, dim;  // of one matrix each
  int slice, left, right, product, gradient, product_gradient, chain[2];

  TileLayout() = default;
  // `size`: of all of it.
  TileLayout(const TTShape& shape, const Pivot& pivot, int64_t rows, bool backward, int64_t* size)
      : a(static_cast<int>(pivot.a)),
        r_left(static_cast<int>(pivot.r_left)),
        q(static_cast<int>(pivot.q)),
        r_right(static_cast<int>(pivot.r_right)),
        b(static_cast<int>(pivot.b)),
        left_first(pivot.left_first),
        slice_size(static_cast<int>(pivot.slice_size())),
        left_size(static_cast<int>(pivot.left_size())),
        right_size(static_cast<int>(pivot.right_size())),
        product_size(static_cast<int>(pivot.product_size())),
        dim(static_cast<int>(shape.dim())) {
    int64_t place = 0;
    const auto take = [&](int64_t floats) {
      const int64_t start = place;
      place += (floats + 3) / 4 * 4;
      return static_cast<int>(start);
    };
    slice = take(pivot.slice_size());
    left = take(rows * pivot.left_size());
    right = take(rows * pivot.right_size());
    product = take(rows * pivot.product_size());
    gradient = take(backward ? rows * shape.dim() : 0);
    product_gradient = take(backward ? rows * pivot.product_size() : 0);
    // Products on the way to a side of several cores; the last one is the side itself.
    int64_t longest = 0, width = 1;
    for (int k = 0; k + 1 < pivot.core; ++k) {
      width *= shape.q[k];
      longest = std::max(longest, width * shape.r[k + 1]);
    }
    width = 1;
    for (int k = shape.d - 1; k - 1 > pivot.core; --k) {
      width *= shape.q[k];
      longest = std::max(longest, width * shape.r[k]);
    }
    for (int& buffer : chain) buffer = take(rows * longest);
    *size = place;
  }
};

template <typename T>
struct PassArgs {
  TTArgs<T> table;
  int core;
  TileLayout tile;
  RowChunk chunk;
  PassPlan plan;
  float* workspace;
};

// One block's tile; Memory is shared memory or workspace.
template <typename T, typename Memory>
class Tile {
 public:
  __device__ Tile(const PassArgs<T>& args, const BlockOfTable& block, Memory memory, Shared<int32_t> rows)
      : args_(args), block_(block), plan_(args.table.plan.get()), memory_(memory), rows_(rows) {}

  // fn(part, first tile) for every tile of this block's parts that has a row of this chunk, with its slice, left and
  // right sides in place; none(part) for every part without such a tile.
  template <typename Fn, typename None>
  __device__ void ForEach(Fn fn, None none) {
    const CudaPlan& layout = args_.table.layout;
    const int core = args_.core;
    const PlanPart* parts = PartsAt(plan_, layout.parts(core));
    for (int64_t part = block_.index; part < layout.max_parts[core]; part += block_.count) {
      const PlanPart own = parts[part];
      if (own.slice < 0) continue;
      const int64_t slice = own.slice;
      int64_t begin = own.begin, end = own.end;
      if (core == layout.main) {  // whose entries are the rows
        begin = max(begin, args_.chunk.begin);
        end = min(end, args_.chunk.end);
      }
      bool any = false;
      for (int64_t first = begin; first < end; first += args_.plan.tile_rows) {
        if (!ReadRows(first, end)) continue;
        if (!any) {
          const T* stored = args_.table.cores[core] + slice * args_.tile.slice_size;
          for (int i = threadIdx.x; i < args_.tile.slice_size; i += kPassThreads)
            memory_[args_.tile.slice + i] = ToCompute(stored[i]);
        }
        FillSide(/*left=*/true);
        FillSide(/*left=*/false);
        fn(part, !any);
        any = true;
        __syncthreads();
      }
      if (!any) none(part);
    }
  }

  // The rows of the tile, -1 where there is none.
  __device__ int64_t row(int t) const { return rows_[t]; }
  __device__ int size() const { return args_.plan.tile_rows; }

  __device__ auto Slice() const { return memory_ + args_.tile.slice; }
  __device__ auto Left() const { return memory_ + args_.tile.left; }
  __device__ auto Right() const { return memory_ + args_.tile.right; }
  __device__ auto Product() const { return memory_ + args_.tile.product; }
  __device__ auto Gradient() const { return memory_ + args_.tile.gradient; }
  __device__ auto ProductGradient() const { return memory_ + args_.tile.product_gradient; }

  // L G or G R, whichever is made first.
  __device__ void MakeProduct() {
    const TileLayout& p = args_.tile;
    if (p.left_first)
      Products({size(), p.a, p.q * p.r_right, p.r_left}, MakeMatrices(Left(), p.left_size, p.r_left, 1),
               MakeMatrices(Slice(), 0, p.q * p.r_right, 1),
               MakeMatrices(Product(), p.product_size, p.q * p.r_right, 1));
    else
      Products({size(), p.r_left * p.q, p.b, p.r_right}, MakeMatrices(Slice(), 0, p.r_right, 1),
               MakeMatrices(Right(), p.right_size, p.b, 1), MakeMatrices(Product(), p.product_size, p.b, 1));
  }

 private:
  // Whether the tile has any row of this chunk.
  __device__ bool ReadRows(int64_t first, int64_t end) {
    const CudaPlan& layout = args_.table.layout;
    const int core = args_.core;
    bool any = false;
    for (int t = threadIdx.x; t < size(); t += kPassThreads) {
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
    const int outer = left ? 0 : shape.d - 1, step = left ? 1 : -1, pivot = args_.core;
    const Memory side = left ? Left() : Right();
    if (outer == pivot) {
      for (int t = threadIdx.x; t < size(); t += kPassThreads) side[t] = rows_[t] < 0 ? 0.0f : 1.0f;
      __syncthreads();
      return;
    }
    Memory in = outer + step == pivot ? side : memory_ + args_.tile.chain[0];
    const int outer_size = static_cast<int>(shape.slice_size(outer));
    for (int e = threadIdx.x; e < size() * outer_size; e += kPassThreads) {
      const int t = e / outer_size;
      const int64_t row = rows_[t];
      in[e] = row < 0 ? 0.0f : ToCompute(RowSlice(outer, row)[e - t * outer_size]);
    }
    __syncthreads();
    int width = static_cast<int>(shape.q[outer]);
    for (int core = outer + step, turn = 1; core != pivot; core += step, turn ^= 1) {
      const bool last = core + step == pivot;
      const Memory out = last ? side : memory_ + args_.tile.chain[turn];
      Extend(core, left, width, in, out);
      __syncthreads();
      in = out;
      width *= static_cast<int>(shape.q[core]);
    }
  }

  // out = in slice from the left, [width, r] [r, q r']; slice in from the right, [r q, r'] [r', width].
  __device__ void Extend(int core, bool left, int width, Memory in, Memory out) {
    const TTShape& shape = args_.table.shape;
    const int r = static_cast<int>(shape.r[core]), q = static_cast<int>(shape.q[core]);
    const int next = static_cast<int>(shape.r[core + 1]);
    const int rows = left ? width : r * q, columns = left ? q * next : width, inner = left ? r : next;
    for (int e = threadIdx.x; e < size() * rows * columns; e += kPassThreads) {
      const int line = e / columns, j = e - line * columns, t = line / rows, i = line - t * rows;
      const int64_t row = rows_[t];
      float sum = 0;
      if (row >= 0) {
        const T* slice = RowSlice(core, row);
        for (int k = 0; k < inner; ++k)
          sum = left ? fmaf(in[(t * width + i) * r + k], ToCompute(slice[k * columns + j]), sum)
                     : fmaf(ToCompute(slice[i * next + k]), in[(t * next + k) * width + j], sum);
      }
      out[e] = sum;
    }
  }

  const PassArgs<T>& args_;
  const BlockOfTable& block_;
  const int32_t* plan_;
  Memory memory_;
  Shared<int32_t> rows_;
};

// Calls fn with the memory of this block's tile.
template <bool kInShared, typename T, typename Fn>
__device__ void WithTile(const PassArgs<T>& args, const BlockOfTable& block, Fn fn) {
  SharedArena arena;
  const Shared<int32_t> rows = arena.Take<int32_t>(kMaxTile);
  if constexpr (kInShared) {
    Tile<T, Shared<float>> tile(args, block, arena.Take<float>(args.plan.tile_floats), rows);
    fn(tile);
  } else {
    Tile<T, float*> tile(args, block, args.workspace + block.index * args.plan.tile_floats, rows);
    fn(tile);
  }
}

}  // namespace jax_tt
