// Small matrix products that a block makes together, for any shape.
#ifndef JAX_TT_CUDA_TT_PRODUCTS_H_
#define JAX_TT_CUDA_TT_PRODUCTS_H_

#include <stdint.h>

#include "ffi/cuda/simt.h"
#include "ffi/cuda/tt_args.h"

namespace jax_tt {

// A stack of matrices somewhere in memory: element (t, i, j) stands at data[t * stack + i * row + j * column].
template <typename Pointer>
struct Matrices {
  Pointer data;
  int64_t stack, row, column;

  __device__ __forceinline__ float at(int64_t t, int64_t i, int64_t j) const {
    return data[t * stack + i * row + j * column];
  }
};
template <typename Pointer>
__device__ __forceinline__ Matrices<Pointer> MakeMatrices(Pointer data, int64_t stack, int64_t row, int64_t column) {
  return {data, stack, row, column};
}

struct ProductSize {
  int64_t stack, rows, columns, inner;
};

// c[t] = a[t] b[t] for every t, one element of c per thread at a time.
template <typename A, typename B, typename C>
__device__ void Products(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b, const Matrices<C>& c) {
  for (int64_t e = threadIdx.x; e < size.stack * size.rows * size.columns; e += blockDim.x) {
    const int64_t j = e % size.columns, i = e / size.columns % size.rows, t = e / (size.columns * size.rows);
    float sum = 0;
    for (int64_t k = 0; k < size.inner; ++k) sum = fmaf(a.at(t, i, k), b.at(t, k, j), sum);
    c.data[t * c.stack + i * c.row + j * c.column] = sum;
  }
}

// c = sum of a[t] b[t] over t, added to what c holds unless `assign`.
template <typename A, typename B, typename C>
__device__ void SumOfProducts(const ProductSize& size, const Matrices<A>& a, const Matrices<B>& b, const Matrices<C>& c,
                              bool assign) {
  for (int64_t e = threadIdx.x; e < size.rows * size.columns; e += blockDim.x) {
    const int64_t j = e % size.columns, i = e / size.columns;
    float sum = assign ? 0.0f : static_cast<float>(c.data[i * c.row + j * c.column]);
    for (int64_t t = 0; t < size.stack; ++t)
      for (int64_t k = 0; k < size.inner; ++k) sum = fmaf(a.at(t, i, k), b.at(t, k, j), sum);
    c.data[i * c.row + j * c.column] = sum;
  }
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_PRODUCTS_H_
