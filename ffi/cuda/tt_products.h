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

// c[t] = a[t] b[t] for every t, one element of c per thread at a time.
template <typename A, typename B, typename C>
__device__ void Products(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b, const Matrices<C>& c) {
  const int threads = static_cast<int>(blockDim.x);
  for (int e = threadIdx.x; e < size.stack * size.rows * size.columns; e += threads) {
    const int line = e / size.columns, j = e - line * size.columns, t = line / size.rows, i = line - t * size.rows;
    float sum = 0;
    for (int k = 0; k < size.inner; ++k) sum = fmaf(a.at(t, i, k), b.at(t, k, j), sum);
    c.data[t * c.stack + i * c.row + j * c.column] = sum;
  }
}

// c = sum of a[t] b[t] over t, added to what c holds unless `assign`.
template <typename A, typename B, typename C>
__device__ void SumOfProducts(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b, const Matrices<C>& c,
                              bool assign) {
  const int threads = static_cast<int>(blockDim.x);
  for (int e = threadIdx.x; e < size.rows * size.columns; e += threads) {
    const int i = e / size.columns, j = e - i * size.columns;
    float sum = assign ? 0.0f : static_cast<float>(c.data[i * c.row + j * c.column]);
    for (int t = 0; t < size.stack; ++t)
      for (int k = 0; k < size.inner; ++k) sum = fmaf(a.at(t, i, k), b.at(t, k, j), sum);
    c.data[i * c.row + j * c.column] = sum;
  }
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_PRODUCTS_H_
