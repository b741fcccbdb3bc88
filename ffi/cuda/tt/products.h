// Small matrix products that a block makes together, for any shape.
#pragma once

#include <stdint.h>

#include "ffi/cuda/simt.h"
#include "ffi/cuda/tt/args.h"

namespace jax_tt {

// A stack of matrices somewhere in memory: element (t, i, j) stands at data[t * stack + i * row + j * column].  All of
// it has fewer than 2^31 elements: divisions of 64 bits, for which GPUs have no instruction, would take most of the
// time.
template <typename Pointer>
struct Matrices {
  Pointer data;
  int stack, row, column;
};
template <typename Pointer>
__device__ __forceinline__ Matrices<Pointer> MakeMatrices(Pointer data, int stack, int row, int column) {
  return {data, stack, row, column};
}

struct ProductSize {
  int stack, rows, columns, inner;
};

// Result elements that a thread computes at once, kSize x kSize, so that every element of a factor that it reads is
// used several times.  They are not neighbours, so that neighbouring threads read neighbouring columns.
template <int kSize>
struct Patch {
  int left[kSize], right[kSize];  // where the rows of a and the columns of b begin
  float sums[kSize][kSize] = {};

  // Adds the products of matrices t.
  template <typename A, typename B>
  __device__ __forceinline__ void Add(const Matrices<A>& a, const Matrices<B>& b, int t, int inner) {
    for (int k = 0; k < inner; ++k) {
      float x[kSize], y[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = a.data[t * a.stack + left[i] + k * a.column];
#pragma unroll
      for (int j = 0; j < kSize; ++j) y[j] = b.data[t * b.stack + right[j] + k * b.row];
#pragma unroll
      for (int i = 0; i < kSize; ++i)
#pragma unroll
        for (int j = 0; j < kSize; ++j) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
    }
  }
};
constexpr int kSide = 4;  // where there are enough elements for all threads

// store(t, i, j, value) for the elements of a[t] b[t].
template <typename A, typename B, typename Store>
__device__ __forceinline__ void Products(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b,
                                         Store store) {
  // Of a factor that is the same for all t, the other one's matrices are treated as one, with all rows or columns.
  const bool tall = b.stack == 0, wide = a.stack == 0 && !tall;
  const int rows = tall ? size.stack * size.rows : size.rows, columns = wide ? size.stack * size.columns : size.columns;
  const int down = (rows + kSide - 1) / kSide, across = (columns + kSide - 1) / kSide;
  const int count = (tall || wide ? 1 : size.stack) * down * across, threads = static_cast<int>(blockDim.x);
  for (int e = threadIdx.x; e < count; e += threads) {
    const int line = e / across, first_column = e - line * across;
    const int stack = line / down, first_row = line - stack * down;
    // Beyond the last row or column, it is that one again, whose result is not stored.
    Patch<kSide> patch;
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      const int row = min(first_row + k * down, rows - 1), column = min(first_column + k * across, columns - 1);
      const int t = tall ? row / size.rows : stack, u = wide ? column / size.columns : stack;
      patch.left[k] = t * a.stack + (tall ? row - t * size.rows : row) * a.row;
      patch.right[k] = u * b.stack + (wide ? column - u * size.columns : column) * b.column;
    }
    patch.Add(a, b, 0, size.inner);
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      const int row = first_row + k * down, t = tall ? row / size.rows : stack;
      if (row >= rows) continue;
#pragma unroll
      for (int l = 0; l < kSide; ++l) {
        const int column = first_column + l * across, u = wide ? column / size.columns : t;
        if (column < columns)
          store(u, tall ? row - t * size.rows : row, wide ? column - u * size.columns : column, patch.sums[k][l]);
      }
    }
  }
}

template <typename A, typename B, typename C>
__device__ __forceinline__ void Products(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b,
                                         const Matrices<C>& c) {
  Products(size, a, b,
           [&](int t, int i, int j, float value) { c.data[t * c.stack + i * c.row + j * c.column] = value; });
}

// As SumOfProducts, by patches of this size.
template <int kSize, typename A, typename B, typename C>
__device__ __forceinline__ void SumByPatches(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b,
                                             const Matrices<C>& c, bool assign) {
  const int down = (size.rows + kSize - 1) / kSize, across = (size.columns + kSize - 1) / kSize;
  const int threads = static_cast<int>(blockDim.x);
  for (int e = threadIdx.x; e < down * across; e += threads) {
    const int first_row = e / across, first_column = e - first_row * across;
    Patch<kSize> patch;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      patch.left[k] = min(first_row + k * down, size.rows - 1) * a.row;
      patch.right[k] = min(first_column + k * across, size.columns - 1) * b.column;
    }
    for (int t = 0; t < size.stack; ++t) patch.Add(a, b, t, size.inner);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
#pragma unroll
      for (int l = 0; l < kSize; ++l) {
        const int row = first_row + k * down, column = first_column + l * across;
        if (row >= size.rows || column >= size.columns) continue;
        const int place = row * c.row + column * c.column;
        c.data[place] = assign ? patch.sums[k][l] : c.data[place] + patch.sums[k][l];
      }
    }
  }
}

// c = sum of a[t] b[t] over t, added to what c holds unless `assign`.  A small result is divided more finely, so that
// there is work for all threads.
template <typename A, typename B, typename C>
__device__ __forceinline__ void SumOfProducts(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b,
                                              const Matrices<C>& c, bool assign) {
  if (size.rows * size.columns >= kSide * kSide / 2 * static_cast<int>(blockDim.x))
    SumByPatches<kSide>(size, a, b, c, assign);
  else
    SumByPatches<1>(size, a, b, c, assign);
}

}  // namespace jax_tt
