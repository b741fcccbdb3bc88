// Small matrix products that a block makes together, for any shape.
#ifndef JAX_TT_CUDA_TT_PRODUCTS_H_
#define JAX_TT_CUDA_TT_PRODUCTS_H_

#include <stdint.h>

#include "ffi/cuda/simt.h"
#include "ffi/cuda/tt_args.h"

namespace jax_tt {

// A stack of matrices somewhere in memory: element (t, i, j) stands at data[t * stack + i * row + j * column].  All of
// it has fewer than 2^31 elements: divisions of 64 bits, for which GPUs have no instruction, would take most of the
// time.
template <typename Pointer>
struct Matrices {
  Pointer data;
  int stack, row, column;

  __device__ __forceinline__ float at(int t, int i, int j) const { return data[t * stack + i * row + j * column]; }
};
template <typename Pointer>
__device__ __forceinline__ Matrices<Pointer> MakeMatrices(Pointer data, int stack, int row, int column) {
  return {data, stack, row, column};
}

struct ProductSize {
  int stack, rows, columns, inner;
};

// Result elements that a thread computes at once in each direction, so that every element of a factor that it reads is
// used several times.
constexpr int kPatch = 4;

// store(t, i, j, value) for the elements of a[t] b[t].  The elements of a thread are not neighbours, so that
// neighbouring threads read neighbouring columns.
template <typename A, typename B, typename Store>
__device__ __forceinline__ void Products(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b,
                                         Store store) {
  // Of a factor that is the same for all t, the other one's matrices are treated as one, with all rows or columns.
  const bool tall = b.stack == 0, wide = a.stack == 0 && !tall;
  const int rows = tall ? size.stack * size.rows : size.rows, columns = wide ? size.stack * size.columns : size.columns;
  const int down = (rows + kPatch - 1) / kPatch, across = (columns + kPatch - 1) / kPatch;
  const int count = (tall || wide ? 1 : size.stack) * down * across, threads = static_cast<int>(blockDim.x);
  for (int e = threadIdx.x; e < count; e += threads) {
    const int line = e / across, first_column = e - line * across;
    const int stack = line / down, first_row = line - stack * down;
    // Beyond the last row or column, it is that one again, whose result is not stored.
    int left[kPatch], right[kPatch];
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
      const int row = min(first_row + k * down, rows - 1), column = min(first_column + k * across, columns - 1);
      const int t = tall ? row / size.rows : stack, u = wide ? column / size.columns : stack;
      left[k] = t * a.stack + (tall ? row - t * size.rows : row) * a.row;
      right[k] = u * b.stack + (wide ? column - u * size.columns : column) * b.column;
    }
    float sums[kPatch][kPatch] = {};
    for (int inner = 0; inner < size.inner; ++inner) {
      float x[kPatch], y[kPatch];
#pragma unroll
      for (int k = 0; k < kPatch; ++k) x[k] = a.data[left[k] + inner * a.column];
#pragma unroll
      for (int k = 0; k < kPatch; ++k) y[k] = b.data[right[k] + inner * b.row];
#pragma unroll
      for (int k = 0; k < kPatch; ++k)
#pragma unroll
        for (int l = 0; l < kPatch; ++l) sums[k][l] = fmaf(x[k], y[l], sums[k][l]);
    }
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
      const int row = first_row + k * down, t = tall ? row / size.rows : stack;
      if (row >= rows) continue;
#pragma unroll
      for (int l = 0; l < kPatch; ++l) {
        const int column = first_column + l * across, u = wide ? column / size.columns : t;
        if (column < columns)
          store(u, tall ? row - t * size.rows : row, wide ? column - u * size.columns : column, sums[k][l]);
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

// As SumOfProducts, kSide x kSide elements of c per thread at a time.
template <int kSide, typename A, typename B, typename C>
__device__ __forceinline__ void SumOfProductsBy(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b,
                                                const Matrices<C>& c, bool assign) {
  const int down = (size.rows + kSide - 1) / kSide, across = (size.columns + kSide - 1) / kSide;
  const int threads = static_cast<int>(blockDim.x);
  for (int e = threadIdx.x; e < down * across; e += threads) {
    const int first_row = e / across, first_column = e - first_row * across;
    int left[kSide], right[kSide];
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      left[k] = min(first_row + k * down, size.rows - 1) * a.row;
      right[k] = min(first_column + k * across, size.columns - 1) * b.column;
    }
    float sums[kSide][kSide] = {};
    for (int t = 0; t < size.stack; ++t) {
      for (int inner = 0; inner < size.inner; ++inner) {
        float x[kSide], y[kSide];
#pragma unroll
        for (int k = 0; k < kSide; ++k) x[k] = a.data[t * a.stack + left[k] + inner * a.column];
#pragma unroll
        for (int k = 0; k < kSide; ++k) y[k] = b.data[t * b.stack + right[k] + inner * b.row];
#pragma unroll
        for (int k = 0; k < kSide; ++k)
#pragma unroll
          for (int l = 0; l < kSide; ++l) sums[k][l] = fmaf(x[k], y[l], sums[k][l]);
      }
    }
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
#pragma unroll
      for (int l = 0; l < kSide; ++l) {
        const int row = first_row + k * down, column = first_column + l * across;
        if (row >= size.rows || column >= size.columns) continue;
        const int place = row * c.row + column * c.column;
        c.data[place] = assign ? sums[k][l] : c.data[place] + sums[k][l];
      }
    }
  }
}

// c = sum of a[t] b[t] over t, added to what c holds unless `assign`.  A small result is divided more finely, so that
// there is work for all threads.
template <typename A, typename B, typename C>
__device__ __forceinline__ void SumOfProducts(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b,
                                              const Matrices<C>& c, bool assign) {
  if (size.rows * size.columns >= kPatch * kPatch / 2 * static_cast<int>(blockDim.x))
    SumOfProductsBy<kPatch>(size, a, b, c, assign);
  else
    SumOfProductsBy<1>(size, a, b, c, assign);
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_PRODUCTS_H_
