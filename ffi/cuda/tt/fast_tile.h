// What the specialised passes work on: tiles of rows that share one slice of the pivot, in shared memory.
//
// Rows with the same left core are adjacent.  Each of them is a *prefix* of the tile, whose product X = L G is made
// once: the lines of L, a of each prefix, are a matrix of 64 lines, X one of 64 lines and one block of columns.  A
// block of columns holds some of the q columns c of the slice, for every one of the r values s; more than one is needed
// where the slice is wide.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/simt.h"
#include "ffi/cuda/tt/args.h"
#include "ffi/cuda/tt/fast_lanes.h"

namespace jax_tt {

constexpr int kTileLines = 64;

constexpr int Log2(int x) { return x == 1 ? 0 : 1 + Log2(x / 2); }

// Sizes known when a kernel is compiled: the rank, on both sides of the slice, and columns c in a block.
template <int kRankValue, int kCountValue>
struct FastTile {
  static constexpr int kRank = kRankValue;
  static constexpr int kCount = kCountValue;
  static constexpr int kColumns = kRank * kCount;
  static constexpr int kLines = kTileLines;
  static constexpr int kThreads = kRank == 128 ? 256 : 128;
  static constexpr int kWarps = kThreads / 32;
  // The fewest blocks of an SM; what registers a thread may have follows from it.
  static constexpr int kBlocks = kRank == 128 ? 1 : kRank == 64 ? 2 : 3;
  static constexpr int kMaxPrefixes = 32, kMaxRows = 32;
  // Of the right sides of a tile's rows and of their gradients, at most.
  static constexpr int kRowFloats = kRank == 128 ? 10240 : 6144;
};

// What every specialised pass is given.
//
// Where the right side is the one to contract first, all of it is seen in a mirror: row^T = R^T G^T L^T, in which the
// right core takes the place of the left one.  Everything lies in memory as it always does; only distances differ.
template <typename T>
struct FastArgs {
  const T *left = nullptr, *slices = nullptr, *right = nullptr;  // the cores
  bool mirrored = false;
  bool tf32 = false;                    // whether products of float32 may be rounded so
  int log_a = 0, log_q = 0, log_b = 0;  // all are powers of two
  int rank = 0;
  PlanRef plan;
  int64_t left_digit = 0, right_digit = 0, parts = 0;  // in the plan
  int64_t max_parts = 0;
  RowChunk chunk;
  int tile_rows = 0;  // at most

  JAX_TT_INLINE int a() const { return 1 << log_a; }
  JAX_TT_INLINE int q() const { return 1 << log_q; }
  JAX_TT_INLINE int b() const { return 1 << log_b; }
  JAX_TT_INLINE int dim() const { return 1 << (log_a + log_q + log_b); }
  // In shared memory of a row: its right side, and its gradient in a block of columns.
  JAX_TT_INLINE int right_floats() const { return rank << log_b; }
  template <typename Tile>
  JAX_TT_INLINE int gradient_floats() const {
    return Tile::kCount << (log_a + log_b);
  }

  // Of an element of a row, of L [a, r], G [r, q, r] and R [r, b].
  JAX_TT_INLINE int RowPlace(int w, int c, int j, bool mirror) const {
    return mirror ? (((j << log_q) + c) << log_a) + w : (((w << log_q) + c) << log_b) + j;
  }
  JAX_TT_INLINE int LeftPlace(int w, int k, bool mirror) const { return mirror ? (k << log_a) + w : w * rank + k; }
  JAX_TT_INLINE int SlicePlace(int k, int c, int s, bool mirror) const {
    return mirror ? ((s << log_q) + c) * rank + k : ((k << log_q) + c) * rank + s;
  }
  JAX_TT_INLINE int RightPlace(int s, int j, bool mirror) const { return mirror ? j * rank + s : (s << log_b) + j; }
};

// Rows of a part within the chunk; of none, and of slice -1, where there is no such part.
struct FastPart {
  int32_t slice, begin, end;

  template <typename T>
  __device__ __forceinline__ FastPart(const FastArgs<T>& args, const int32_t* plan, int64_t part) {
    const PlanPart all = PartsAt(plan, args.parts)[part];
    slice = all.slice;
    begin = static_cast<int32_t>(max(static_cast<int64_t>(all.begin), args.chunk.begin));
    end = static_cast<int32_t>(min(static_cast<int64_t>(all.end), args.chunk.end));
  }
};

// The rows of a tile and the prefixes that they share.
template <typename Tile>
class TileRows {
 public:
  static constexpr int kWords =
      2 + Tile::kMaxPrefixes + (Tile::kMaxPrefixes + 1) + 2 * Tile::kMaxRows + (Tile::kMaxRows + 1);

  __device__ __forceinline__ explicit TileRows(Shared<int32_t> words) : words_(words) {}

  // Takes rows from `first` on while there are lines for their prefixes.  For all threads; the first warp works.
  template <typename T>
  __device__ __forceinline__ void Find(const FastArgs<T>& args, const int32_t* plan, int32_t first, int32_t end) {
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x, max_prefixes = Tile::kLines >> args.log_a;
    const bool inside = lane < args.tile_rows && lane < end - first;
    const int left = inside ? plan[args.left_digit + first + lane] : -1;
    const int right = inside ? plan[args.right_digit + first + lane] : -1;
    const int before = __shfl_up_sync(kAllLanes, left, 1);
    const bool starts = inside && (lane == 0 || left != before);
    const unsigned starting = __ballot_sync(kAllLanes, starts);
    const int prefix = __popc(starting & (0xffffffffu >> (31 - lane))) - 1;
    const bool taken = inside && prefix < max_prefixes;
    const int rows = __popc(__ballot_sync(kAllLanes, taken)), prefixes = min(__popc(starting), max_prefixes);
    if (taken) {
      RightDigits()[lane] = right;
      Prefixes()[lane] = prefix;
      if (starts) {
        LeftDigits()[prefix] = left;
        FirstRows()[prefix] = lane;
      }
    }
    if (lane >= prefixes) FirstRows()[lane] = rows;
    if (lane == 0) {
      FirstRows()[Tile::kMaxPrefixes] = rows;
      words_[0] = rows;
      words_[1] = prefixes;
    }
  }

  // Where the positions of the rows begin in their order: for passes that go through these.  The threads after those of
  // Find work.  `row_begin`: in the plan.
  template <typename T>
  __device__ __forceinline__ void FindPlaces(const FastArgs<T>& args, const int32_t* plan, int64_t row_begin,
                                             int32_t first, int32_t end) {
    static_assert(Tile::kThreads > 32 + Tile::kMaxRows);
    const int row = static_cast<int>(threadIdx.x) - 32;
    if (row >= 0 && row <= args.tile_rows && row <= end - first) FirstPlaces()[row] = plan[row_begin + first + row];
  }

  __device__ __forceinline__ int rows() const { return words_[0]; }
  __device__ __forceinline__ int prefixes() const { return words_[1]; }
  __device__ __forceinline__ int left_digit(int prefix) const { return LeftDigits()[prefix]; }
  // First row of a prefix, and of the one past the last.
  __device__ __forceinline__ int first_row(int prefix) const { return FirstRows()[prefix]; }
  __device__ __forceinline__ int right_digit(int row) const { return RightDigits()[row]; }
  __device__ __forceinline__ int prefix(int row) const { return Prefixes()[row]; }
  // First place of a row's positions, and of the one past the last.
  __device__ __forceinline__ int first_place(int row) const { return FirstPlaces()[row]; }

 private:
  __device__ __forceinline__ Shared<int32_t> LeftDigits() const { return words_ + 2; }
  __device__ __forceinline__ Shared<int32_t> FirstRows() const { return LeftDigits() + Tile::kMaxPrefixes; }
  __device__ __forceinline__ Shared<int32_t> RightDigits() const { return FirstRows() + (Tile::kMaxPrefixes + 1); }
  __device__ __forceinline__ Shared<int32_t> Prefixes() const { return RightDigits() + Tile::kMaxRows; }
  __device__ __forceinline__ Shared<int32_t> FirstPlaces() const { return Prefixes() + Tile::kMaxRows; }

  Shared<int32_t> words_;
};

// The functions that load come in two kinds: a loop that asks which one it is would wait for every load.  As many loads
// are on their way at once as there are registers for, and one of a vector in a mirror is four.
template <bool kMirrored>
constexpr int kVectorsAhead = kMirrored ? 2 : 8;

// The block of columns of a slice that begins at column c = first, [rank, columns].
template <bool kMirrored, typename Tile, typename Math, typename T>
__device__ __forceinline__ void LoadSlice(const FastArgs<T>& args, int64_t slice, int first,
                                          Shared<typename Math::Operand> to) {
  const T* from = args.slices + slice * ((Tile::kRank * Tile::kRank) << args.log_q);
  constexpr int kRowVectors = Tile::kColumns / 4;
  const int thread = ThreadHere();
  static_assert(Tile::kRank * kRowVectors % Tile::kThreads == 0);
  JAX_TT_UNROLL_BY(kVectorsAhead<kMirrored>)
  for (int i = 0; i < Tile::kRank * kRowVectors; i += Tile::kThreads) {
    const int e = i + thread;
    // Neighbouring threads read neighbours in memory: along s, or along k.
    const int k = kMirrored ? e % Tile::kRank : e / kRowVectors;
    const int n = (kMirrored ? e / Tile::kRank : e % kRowVectors) * 4;
    const T* p = from + args.SlicePlace(k, first + n / Tile::kRank, n % Tile::kRank, kMirrored);
    Math::Store(to + (k * Math::template Lead<Tile>::kColumns + n),
                kMirrored ? LoadStored4(p, Tile::kRank << args.log_q) : LoadStored4(p));
  }
}

// The lines of L of all prefixes; zeros where there is none.
template <bool kMirrored, typename Tile, typename Math, typename T>
__device__ __forceinline__ void LoadLeft(const FastArgs<T>& args, const TileRows<Tile>& rows,
                                         Shared<typename Math::Operand> to) {
  constexpr int kRowVectors = Tile::kRank / 4;
  const int prefixes = rows.prefixes(), thread = ThreadHere();
  JAX_TT_UNROLL_BY(kVectorsAhead<kMirrored>)
  for (int i = 0; i < Tile::kLines * kRowVectors; i += Tile::kThreads) {
    const int e = i + thread, m = e / kRowVectors, k = e % kRowVectors * 4;
    const int prefix = m >> args.log_a, w = m & (args.a() - 1);
    float4 value = make_float4(0, 0, 0, 0);
    if (prefix < prefixes) {
      const T* p = args.left + static_cast<int64_t>(rows.left_digit(prefix)) * (Tile::kRank << args.log_a) +
                   args.LeftPlace(w, k, kMirrored);
      value = kMirrored ? LoadStored4(p, args.a()) : LoadStored4(p);
    }
    Math::Store(to + (m * Math::template Lead<Tile>::kLeft + k), value);
  }
}

// The right sides of the rows, transposed: [row, b, rank].
template <bool kMirrored, typename Tile, typename T>
__device__ __forceinline__ void LoadRight(const FastArgs<T>& args, const TileRows<Tile>& rows, Shared<float> to) {
  const int mask = args.b() - 1, size = Tile::kRank << args.log_b, count = rows.rows() * size;
  JAX_TT_UNROLL_BY(4)
  for (int i = 4 * ThreadHere(); i < count; i += 4 * Tile::kThreads) {
    const int row = (i / Tile::kRank) >> args.log_b, e = i & (size - 1);
    const float4 value = LoadStored4(args.right + static_cast<int64_t>(rows.right_digit(row)) * size + e);
    if constexpr (kMirrored) {
      Store4(to + i, value);
    } else {
      JAX_TT_UNROLL
      for (int x = 0; x < 4; ++x)
        to[row * size + ((e + x) & mask) * Tile::kRank + ((e + x) >> args.log_b)] = Element(value, x);
    }
  }
}

// fn(std::bool_constant) of whether the table is seen in a mirror.
template <typename T, typename Fn>
__device__ __forceinline__ void WithMirror(const FastArgs<T>& args, Fn fn) {
  if (args.mirrored)
    fn(std::bool_constant<true>());
  else
    fn(std::bool_constant<false>());
}

}  // namespace jax_tt
