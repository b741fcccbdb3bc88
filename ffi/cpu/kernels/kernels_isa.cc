// The micro-kernels, written once with the compiler's vector types.
//
// This file is compiled once per instruction set with JAX_TT_ISA naming the namespace.  It includes no standard
// library template and gives everything internal linkage: an inline function emitted here with wide instructions
// must never be the copy that the linker keeps for the whole library.
#include "ffi/core/exact_sum.h"
#include "ffi/cpu/kernels/coded_kernels.h"
#include "ffi/cpu/kernels/find_keys.h"
#include "ffi/cpu/kernels/hash_kernels.h"
#include "ffi/cpu/kernels/initial_row.h"
#include "ffi/cpu/kernels/kernels.h"
#include "ffi/cpu/kernels/scan_codes.h"
#include "ffi/cpu/kernels/scan_packed.h"
#include "ffi/cpu/kernels/scan_products.h"
#include "ffi/cpu/kernels/search_codes.h"
#include "ffi/cpu/kernels/sum_coded.h"
#include "ffi/cpu/kernels/sum_lanes.h"
#include "ffi/cpu/kernels/sum_packed.h"

namespace jax_tt {
namespace JAX_TT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kWideVectors = 4, kWideRows = 6;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kWideVectors = 2, kWideRows = 6;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kWideVectors = 4, kWideRows = 6;
#else
constexpr int kVectorBytes = 16, kWideVectors = 2, kWideRows = 6;
#endif
// A block narrower than kWideVectors leaves registers for more rows, which the latency of the adds needs.
constexpr int kNarrowRows = 8;

template <typename T, int W>
struct VectorOf {
  typedef T type __attribute__((vector_size(W * sizeof(T)), aligned(alignof(T)), may_alias));
};
template <typename T>
struct VectorOf<T, 1> {
  typedef T type;
};

// c[kRows, kVectors * W] (+)= sum over t of a(row, t) * b[t, :].  kTransposed: a is stored [t, row].
template <typename T, int W, int kRows, int kVectors, bool kTransposed>
inline __attribute__((always_inline)) void Block(int64_t depth, const T* __restrict a, int64_t lda,
                                                 const T* __restrict b, int64_t ldb, T* __restrict c, int64_t ldc,
                                                 bool accumulate) {
  typedef typename VectorOf<T, W>::type V;
  V acc[kRows][kVectors];
  if (accumulate) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[i][j] = *reinterpret_cast<const V*>(c + i * ldc + j * W);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[i][j] = V{};
    // Stores that miss the cache would wait for each other: ask for the next block's lines while this one is computed.
    constexpr int kLine = 64 / static_cast<int>(sizeof(T));
#pragma GCC unroll 8
    for (int i = kRows; i < 2 * kRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors * W; j += kLine) __builtin_prefetch(c + i * ldc + j, 1);
  }
  for (int64_t t = 0; t < depth; ++t) {
    V bv[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) bv[j] = *reinterpret_cast<const V*>(b + t * ldb + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const T av = kTransposed ? a[t * lda + i] : a[i * lda + t];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[i][j] += av * bv[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) *reinterpret_cast<V*>(c + i * ldc + j * W) = acc[i][j];
}

// The last 1 .. kRows - 1 rows of a panel.
template <typename T, int W, int kRows, int kVectors, bool kTransposed>
inline __attribute__((always_inline)) void RowTail(int64_t rows, int64_t depth, const T* a, int64_t lda, const T* b,
                                                   int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  if constexpr (kRows > 0) {
    if (rows == kRows)
      Block<T, W, kRows, kVectors, kTransposed>(depth, a, lda, b, ldb, c, ldc, accumulate);
    else
      RowTail<T, W, kRows - 1, kVectors, kTransposed>(rows, depth, a, lda, b, ldb, c, ldc, accumulate);
  }
}

// One panel of kVectors * W columns over all rows of c.
template <typename T, int W, int kVectors, bool kTransposed>
__attribute__((noinline)) void Panel(int64_t rows, int64_t depth, const T* a, int64_t lda, const T* b, int64_t ldb,
                                     T* c, int64_t ldc, bool accumulate) {
  constexpr int kRows = kVectors == kWideVectors ? kWideRows : kNarrowRows;
  const int64_t step = kTransposed ? kRows : kRows * lda;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows, a += step, c += kRows * ldc)
    Block<T, W, kRows, kVectors, kTransposed>(depth, a, lda, b, ldb, c, ldc, accumulate);
  RowTail<T, W, kRows - 1, kVectors, kTransposed>(rows - i, depth, a, lda, b, ldb, c, ldc, accumulate);
}

// The columns that are left over, in vectors of half the width each time.
template <typename T, int W, bool kTransposed>
inline __attribute__((always_inline)) void ColumnTail(int64_t rows, int64_t columns, int64_t depth, const T* a,
                                                      int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                                                      bool accumulate) {
  if constexpr (W >= 1) {
    if (columns & W) {
      Panel<T, W, 1, kTransposed>(rows, depth, a, lda, b, ldb, c, ldc, accumulate);
      b += W;
      c += W;
    }
    ColumnTail<T, W / 2, kTransposed>(rows, columns, depth, a, lda, b, ldb, c, ldc, accumulate);
  }
}

template <typename T, bool kTransposed>
inline __attribute__((always_inline)) void Gemm(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t lda,
                                                const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  constexpr int W = kVectorBytes / sizeof(T);
  int64_t j = 0;
  for (; j + kWideVectors * W <= columns; j += kWideVectors * W)
    Panel<T, W, kWideVectors, kTransposed>(rows, depth, a, lda, b + j, ldb, c + j, ldc, accumulate);
  if constexpr (kWideVectors > 2) {
    if (columns - j >= 2 * W) {
      Panel<T, W, 2, kTransposed>(rows, depth, a, lda, b + j, ldb, c + j, ldc, accumulate);
      j += 2 * W;
    }
  }
  if (columns - j >= W) {
    Panel<T, W, 1, kTransposed>(rows, depth, a, lda, b + j, ldb, c + j, ldc, accumulate);
    j += W;
  }
  ColumnTail<T, W / 2, kTransposed>(rows, columns - j, depth, a, lda, b + j, ldb, c + j, ldc, accumulate);
}

template <typename T>
void GemmNN(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
            bool accumulate) {
  Gemm<T, false>(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
}

template <typename T>
void GemmTN(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
            bool accumulate) {
  Gemm<T, true>(k, n, m, a, lda, b, ldb, c, ldc, accumulate);
}

// c[rows, kCols] = a[rows, depth] b[kCols, depth]^T, one vector of c at a time: some rows, or part of one.
template <typename T, int kCols>
void JoinBlocks(int64_t rows, int64_t depth, const T* __restrict a, const T* __restrict b, T* __restrict c) {
  constexpr int W = kVectorBytes / sizeof(T), kPart = kCols < W ? kCols : W, kRows = W / kPart;
  typedef typename VectorOf<T, W>::type V;
  for (int64_t i = 0; i < rows; i += kRows) {
    // The last block may overlap the one before.
    const int64_t first = i + kRows <= rows ? i : rows - kRows;
    for (int64_t j = 0; j < kCols; j += kPart) {
      const T *a_block = a + first * depth, *b_block = b + j * depth;
      V acc[W] = {};
      for (int64_t t = 0; t < depth; t += W) {
#pragma GCC unroll 16
        for (int l = 0; l < W; ++l)
          acc[l] += *reinterpret_cast<const V*>(a_block + l / kPart * depth + t) *
                    *reinterpret_cast<const V*>(b_block + l % kPart * depth + t);
      }
      SumLanes<W, 16 / static_cast<int>(sizeof(T)), W>(acc);
      *reinterpret_cast<V*>(c + first * kCols + j) = acc[0];
    }
  }
}

template <typename T>
void NarrowJoin(int64_t rows, int64_t cols, int64_t depth, const T* a, const T* b, T* c) {
  if (cols == 2)
    JoinBlocks<T, 2>(rows, depth, a, b, c);
  else
    JoinBlocks<T, 4>(rows, depth, a, b, c);
}

// Columns [0, kVectors * W) of both gradients of a join.  The rows of b and of its gradient stay in registers.
template <typename T, int W, int kVectors, int kCols>
inline __attribute__((always_inline)) void JoinGradientPanel(int64_t rows, int64_t rank, const T* __restrict g,
                                                             const T* __restrict a, const T* __restrict b,
                                                             T* __restrict da, bool add_a, T* __restrict db,
                                                             bool add_b) {
  typedef typename VectorOf<T, W>::type V;
  V b_row[kCols][kVectors], sum[kCols][kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kCols; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      b_row[j][v] = *reinterpret_cast<const V*>(b + j * rank + v * W);
      sum[j][v] = add_b ? *reinterpret_cast<const V*>(db + j * rank + v * W) : V{};
    }
  for (int64_t i = 0; i < rows; ++i, g += kCols, a += rank, da += rank) {
    V a_row[kVectors], out[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      a_row[v] = *reinterpret_cast<const V*>(a + v * W);
      out[v] = add_a ? *reinterpret_cast<const V*>(da + v * W) : V{};
      __builtin_prefetch(a + 2 * rows * rank + v * W);  // saved products come from memory, mostly in this order
    }
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        out[v] += g[j] * b_row[j][v];
        sum[j][v] += g[j] * a_row[v];
      }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<V*>(da + v * W) = out[v];
  }
#pragma GCC unroll 8
  for (int j = 0; j < kCols; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<V*>(db + j * rank + v * W) = sum[j][v];
}

// All columns, in panels of kVectors * W, then of one ever narrower vector.
template <typename T, int W, int kVectors, int kCols>
inline __attribute__((always_inline)) void JoinGradientColumns(int64_t rows, int64_t columns, int64_t rank, const T* g,
                                                               const T* a, const T* b, T* da, bool add_a, T* db,
                                                               bool add_b) {
  constexpr int kStep = kVectors * W;
  for (; columns >= kStep; columns -= kStep, a += kStep, b += kStep, da += kStep, db += kStep)
    JoinGradientPanel<T, W, kVectors, kCols>(rows, rank, g, a, b, da, add_a, db, add_b);
  if constexpr (kStep > 1)
    if (columns > 0)
      JoinGradientColumns<T, kVectors == 1 ? W / 2 : W, 1, kCols>(rows, columns, rank, g, a, b, da, add_a, db, add_b);
}

template <typename T>
void JoinGradient(int64_t rows, int64_t cols, int64_t rank, const T* g, const T* a, const T* b, T* da, bool add_a,
                  T* db, bool add_b) {
  constexpr int W = kVectorBytes / sizeof(T), kHeld = kVectorBytes == 64 ? 8 : 4;  // vectors of b in registers
  if (cols == 2) return JoinGradientColumns<T, W, kHeld / 2, 2>(rows, rank, rank, g, a, b, da, add_a, db, add_b);
  if (cols == 4) return JoinGradientColumns<T, W, kHeld / 4, 4>(rows, rank, rank, g, a, b, da, add_a, db, add_b);
  if constexpr (kHeld == 8)
    if (cols == 8) return JoinGradientColumns<T, W, 1, 8>(rows, rank, rank, g, a, b, da, add_a, db, add_b);
  for (int64_t i = 0; i < rows * rank; i += 64 / static_cast<int64_t>(sizeof(T)))
    __builtin_prefetch(a + 2 * rows * rank + i);
  GemmNN(rows, rank, cols, g, cols, b, rank, da, rank, add_a);
  GemmTN(rows, rank, cols, g, cols, a, rank, db, rank, add_b);
}

template <typename T>
void Axpy(int64_t n, T alpha, const T* __restrict x, T* __restrict y) {
  for (int64_t i = 0; i < n; ++i) y[i] += alpha * x[i];
}

template <typename T>
T Dot(int64_t n, const T* x, const T* y) {
  typedef typename VectorOf<T, kVectorBytes / static_cast<int>(sizeof(T))>::type V;
  constexpr int W = kVectorBytes / sizeof(T);
  V acc{};
  int64_t i = 0;
  for (; i + W <= n; i += W) acc += *reinterpret_cast<const V*>(x + i) * *reinterpret_cast<const V*>(y + i);
  T sum = 0;
  for (int j = 0; j < W; ++j) sum += acc[j];
  for (; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

// Swaps the upper right with the lower left kBlock x kBlock blocks of two rows of blocks.
template <int W, int kBlock, typename V, int... I>
inline __attribute__((always_inline)) void SwapBlocks(V& a, V& b, Indices<0, I...>) {
  const V low = __builtin_shufflevector(a, b, ((I & kBlock) ? W + I - kBlock : I)...);
  b = __builtin_shufflevector(a, b, ((I & kBlock) ? W + I : I + kBlock)...);
  a = low;
}

// Transposes W vectors of W elements, block size by block size.
template <int W, int kBlock, typename V>
inline __attribute__((always_inline)) void TransposeVectors(V* rows) {
  if constexpr (kBlock < W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
      if ((i & kBlock) == 0) SwapBlocks<W, kBlock>(rows[i], rows[i + kBlock], Indices<W>{});
    TransposeVectors<W, 2 * kBlock>(rows);
  }
}

// out[cols, rows] = in[rows, cols]^T for the tiles of W x W in [first_row, rows) x [first_col, cols), which they fill.
template <typename T, int W>
void TransposeTiles(int64_t first_row, int64_t last_row, int64_t first_col, int64_t last_col, const T* __restrict in,
                    int64_t in_stride, T* __restrict out, int64_t out_stride) {
  typedef typename VectorOf<T, W>::type V;
  for (int64_t i = first_row; i < last_row; i += W) {
    for (int64_t j = first_col; j < last_col; j += W) {
      V tile[W];
#pragma GCC unroll 16
      for (int k = 0; k < W; ++k) tile[k] = *reinterpret_cast<const V*>(in + (i + k) * in_stride + j);
      TransposeVectors<W, 1>(tile);
#pragma GCC unroll 16
      for (int k = 0; k < W; ++k) *reinterpret_cast<V*>(out + (j + k) * out_stride + i) = tile[k];
    }
  }
}

template <typename T>
void Transpose(int64_t rows, int64_t cols, const T* __restrict in, T* __restrict out) {
  constexpr int W = kVectorBytes / sizeof(T), kSmall = W < 4 ? W : 4;
  const int64_t wide_rows = rows / W * W, wide_cols = cols / W * W;
  const int64_t full_rows = rows / kSmall * kSmall, full_cols = cols / kSmall * kSmall;
  TransposeTiles<T, W>(0, wide_rows, 0, wide_cols, in, cols, out, rows);
  if constexpr (W > kSmall) {
    TransposeTiles<T, kSmall>(0, wide_rows, wide_cols, full_cols, in, cols, out, rows);
    TransposeTiles<T, kSmall>(wide_rows, full_rows, 0, full_cols, in, cols, out, rows);
  }
  for (int64_t i = 0; i < full_rows; ++i)
    for (int64_t j = full_cols; j < cols; ++j) out[j * rows + i] = in[i * cols + j];
  for (int64_t i = full_rows; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) out[j * rows + i] = in[i * cols + j];
}

template <typename T>
void SumRows(int64_t n, const T* __restrict rows, const int32_t* __restrict index, int64_t count, T* __restrict sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] = 0;
  for (int64_t k = 0; k < count; ++k) {
    // The rows are scattered over a buffer larger than the second-level cache.
    if (k + 2 < count) {
      const T* next = rows + index[k + 2] * n;
      for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(next + i);
    }
    const T* row = rows + index[k] * n;
    for (int64_t i = 0; i < n; ++i) sum[i] += row[i];
  }
}

// Rows to prefetch ahead: as many cache lines as a core can wait for.
constexpr int64_t RowsAhead(int64_t bytes) { return bytes > 192 ? 8 : 16; }

template <typename T>
inline __attribute__((always_inline)) void PrefetchRow(const T* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + i);
}

// One tile of the columns of one bag.  Of the row at[k + ahead], if it is before at[known], `fetch` elements are
// prefetched.
template <typename T, int W, int kVectors>
inline __attribute__((always_inline)) void SumTile(const T* __restrict from, const int64_t* __restrict at,
                                                   const T* __restrict weight, int64_t count, bool add,
                                                   T* __restrict out, int64_t ahead, int64_t known, int64_t fetch) {
  typedef typename VectorOf<T, W>::type V;
  V sum[kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) sum[j] = add ? *reinterpret_cast<const V*>(out + j * W) : V{};
  for (int64_t k = 0; k < count; ++k) {
    if (k + ahead < known) PrefetchRow(from + at[k + ahead], fetch);
    const T* row = from + at[k];
    const T scale = weight ? weight[k] : T{1};
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) sum[j] += scale * *reinterpret_cast<const V*>(row + j * W);
  }
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) *reinterpret_cast<V*>(out + j * W) = sum[j];
}

// SumBags of rows of kVectors * W elements, whose sums stay in registers.  Bags often have a single row, so that the
// loop over bags must cost as little as the loop over rows.
template <typename T, int W, int kVectors>
void SumWholeRows(const T* __restrict from, const int64_t* __restrict at, const T* __restrict weight, int64_t first,
                  const int32_t* __restrict end, int64_t bags, bool add, T* __restrict out,
                  const int64_t* __restrict out_at) {
  constexpr int64_t n = kVectors * W, kAhead = RowsAhead(n * sizeof(T));
  const int64_t last = end[bags - 1];
  for (int64_t k = first; k < last && k < first + kAhead; ++k) PrefetchRow(from + at[k], n);
  for (int64_t b = 0, begin = first; b < bags; begin = end[b++])
    SumTile<T, W, kVectors>(from, at + begin, weight ? weight + begin : nullptr, end[b] - begin, add && b == 0,
                            out + (out_at ? out_at[b] : b * n), kAhead, last - begin, n);
}

// SumBags of rows of any length, tile by tile.
template <typename T>
void SumTiles(int64_t n, const T* __restrict from, const int64_t* __restrict at, const T* __restrict weight,
              int64_t first, const int32_t* __restrict end, int64_t bags, bool add, T* __restrict out,
              const int64_t* __restrict out_at) {
  constexpr int W = kVectorBytes / sizeof(T);
  const int64_t last = end[bags - 1], ahead = RowsAhead(n * static_cast<int64_t>(sizeof(T)));
  for (int64_t k = first; k < last && k < first + ahead; ++k) PrefetchRow(from + at[k], n);
  for (int64_t b = 0, begin = first; b < bags; begin = end[b++]) {
    const int64_t count = end[b] - begin, known = last - begin;
    const int64_t* own = at + begin;
    const T* scale = weight ? weight + begin : nullptr;
    T* to = out + (out_at ? out_at[b] : b * n);
    const bool onto = add && b == 0;
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
      SumTile<T, W, 4>(from + i, own, scale, count, onto, to + i, ahead, known, i ? 0 : n);
    for (; i + W <= n; i += W) SumTile<T, W, 1>(from + i, own, scale, count, onto, to + i, ahead, known, i ? 0 : n);
    for (; i < n; ++i) SumTile<T, 1, 1>(from + i, own, scale, count, onto, to + i, ahead, known, i ? 0 : n);
  }
}

// Calls SumWholeRows if rows are at most eight vectors of W elements, or an odd number of shorter ones.
template <typename T, int W, int kVectors, int kLess, typename... Args>
bool SumWhole(int64_t n, Args... args) {
  if (n == kVectors * W) {
    SumWholeRows<T, W, kVectors>(args...);
    return true;
  }
  if constexpr (kVectors > kLess)
    return SumWhole<T, W, kVectors - kLess, kLess>(n, args...);
  else if constexpr (W * sizeof(T) > 16)
    return SumWhole<T, W / 2, 7, 2>(n, args...);
  return false;
}

template <typename T>
void SumBags(int64_t n, const T* from, const int64_t* at, const T* weight, int64_t first, const int32_t* end,
             int64_t bags, bool add, T* out, const int64_t* out_at) {
  constexpr int W = kVectorBytes / sizeof(T);
  if (bags == 0 || n == 0) return;
  if (!SumWhole<T, W, 8, 1>(n, from, at, weight, first, end, bags, add, out, out_at))
    SumTiles(n, from, at, weight, first, end, bags, add, out, out_at);
}

template <typename T, int W>
void AddExactlyTiles(int64_t first, int64_t n, const T* __restrict from, int64_t count, T* __restrict sum,
                     T* __restrict lost) {
  typedef typename VectorOf<T, W>::type V;
  for (int64_t i = first; i + W <= n; i += W) {
    V total = *reinterpret_cast<const V*>(sum + i), error = *reinterpret_cast<const V*>(lost + i);
    for (int64_t k = 0; k < count; ++k) AddExactly(*reinterpret_cast<const V*>(from + k * n + i), &total, &error);
    *reinterpret_cast<V*>(sum + i) = total;
    *reinterpret_cast<V*>(lost + i) = error;
  }
}

template <typename T>
void AddVectorsExactly(int64_t n, const T* from, int64_t count, T* sum, T* lost) {
  constexpr int W = kVectorBytes / sizeof(T);
  AddExactlyTiles<T, W>(0, n, from, count, sum, lost);
  AddExactlyTiles<T, 1>(n / W * W, n, from, count, sum, lost);
}

template <typename T>
void Widen(int64_t n, const T* __restrict from, float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = ToCompute(from[i]);
}

#define JAX_TT_STRING_(x) #x
#define JAX_TT_STRING(x) JAX_TT_STRING_(x)

}  // namespace

#define JAX_TT_KERNELS(T, updates)                                                 \
  {GemmNN<T>,    GemmTN<T>,  NarrowJoin<T>, JoinGradient<T>,      Axpy<T>, Dot<T>, \
   Transpose<T>, SumRows<T>, SumBags<T>,    AddVectorsExactly<T>, updates, JAX_TT_STRING(JAX_TT_ISA)}
extern const Kernels<float> kFloat = JAX_TT_KERNELS(float, kFloatUpdates);
extern const Kernels<double> kDouble = JAX_TT_KERNELS(double, kDoubleUpdates);
extern const HashKernels kHash = {FindKeys, InitialPart};
extern const QuantizedKernels kQuantized = {SumPacked<8>, SumPacked<4>, SumPacked<3>, SumPacked<2>};
extern const SumCodedBags kSumCoded = SumCoded;
extern const SearchCodes kSearchCodes = SearchAllRows;
extern const ScanKernels kScan = {ScanProducts,      ScanDots,          ScanPackedDots<8>, ScanPackedDots<4>,
                                  ScanPackedDots<3>, ScanPackedDots<2>, ScanBytes,         ScanHalfBytes,
                                  Widen<bfloat16>,   Widen<float16>,    kScanLanes,        kPackedLanes};

}  // namespace JAX_TT_ISA
}  // namespace jax_tt
