// Dense micro-kernels, compiled once per instruction set and chosen at run time.
//
// All matrices are row-major with a leading dimension counted in elements.  The function tables are the only symbols
// that cross from an instruction-set translation unit into the rest of the library, so code built for a newer
// processor can never be linked into a path that an older one runs.
#pragma once

#include <stdint.h>

#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

template <typename T>
struct Kernels {
  // c[m, n] = a[m, k] b[k, n], added to c when `accumulate`.
  void (*gemm_nn)(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                  bool accumulate);
  // c[k, n] = a[m, k]^T b[m, n], added to c when `accumulate`.
  void (*gemm_tn)(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                  bool accumulate);
  // c[rows, cols] = a[rows, depth] b[cols, depth]^T, where FitsNarrowJoin says that it can.
  void (*narrow_join)(int64_t rows, int64_t cols, int64_t depth, const T* a, const T* b, T* c);
  // For c = a b^T with gradient g[rows, cols]: da[rows, rank] = g b and db[cols, rank] = g^T a, added where asked.
  void (*join_gradient)(int64_t rows, int64_t cols, int64_t rank, const T* g, const T* a, const T* b, T* da, bool add_a,
                        T* db, bool add_b);
  // y[n] += alpha x[n]
  void (*axpy)(int64_t n, T alpha, const T* x, T* y);
  // sum of x[i] y[i]
  T (*dot)(int64_t n, const T* x, const T* y);
  // out[cols, rows] = in[rows, cols]^T
  void (*transpose)(int64_t rows, int64_t cols, const T* in, T* out);
  // sum[n] = rows[index[0]] + rows[index[1]] + ... over `count` rows of n elements
  void (*sum_rows)(int64_t n, const T* rows, const int32_t* index, int64_t count, T* sum);
  // Sums of scattered vectors of n elements, which are at from + at[k]: out + out_at[b] = the sum over k in [end[b -
  // 1], end[b]) of weight[k] from[at[k]], added to what is there for b = 0 when `add`.  end[-1] stands for `first`;
  // without weight they are 1; without out_at the results follow each other.
  void (*sum_bags)(int64_t n, const T* from, const int64_t* at, const T* weight, int64_t first, const int32_t* end,
                   int64_t bags, bool add, T* out, const int64_t* out_at);
  // sum[n] += the `count` vectors at `from`, and lost[n] += what rounding loses of each addition
  void (*add_exactly)(int64_t n, const T* from, int64_t count, T* sum, T* lost);
  const RowUpdate<T>* update;  // of every rule of the library, by its kind
  const char* name;
};

// Whether full vectors of any instruction set cover the operands of narrow_join.
inline bool FitsNarrowJoin(int64_t rows, int64_t cols, int64_t depth) {
  return (cols == 2 || cols == 4) && rows * cols >= 16 && depth % 16 == 0;
}

// The table for the best instruction set that this processor has (JAX_TT_CPU_ISA lowers it, for tests).
template <typename T>
const Kernels<T>& GetKernels();

// One pair per instruction set; the element type is in the name because templates must not be shared across them.
#define JAX_TT_DECLARE_KERNELS(isa)                \
  namespace isa {                                  \
  extern const Kernels<float> kFloat;              \
  extern const Kernels<double> kDouble;            \
  extern const RowUpdate<float> kFloatUpdates[];   \
  extern const RowUpdate<double> kDoubleUpdates[]; \
  }
JAX_TT_DECLARE_KERNELS(baseline)
JAX_TT_DECLARE_KERNELS(x86_64_v3)
JAX_TT_DECLARE_KERNELS(x86_64_v4)
#undef JAX_TT_DECLARE_KERNELS

}  // namespace jax_tt
