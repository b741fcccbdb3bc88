#include <utility>

#include "ffi/cuda/shared_limit.h"
#include "ffi/cuda/tt/fast.h"
#include "ffi/cuda/tt/fast_passes.h"
#include "ffi/cuda/tt/fast_ranks.h"

namespace jax_tt {
namespace {

bool IsFactor(int64_t q) { return q == 2 || q == 4 || q == 8; }

// The core that is contracted with the pivot first, the other one, and the factors of a row in this order.
struct Factors {
  int left, right, log_a, log_q, log_b;

  Factors(const TTShape& shape, const Pivot& pivot)
      : left(pivot.left_first ? 0 : 2),
        right(2 - left),
        log_a(Log2(static_cast<int>(shape.q[left]))),
        log_q(Log2(static_cast<int>(shape.q[pivot.core]))),
        log_b(Log2(static_cast<int>(shape.q[right]))) {}
};

template <typename T>
FastArgs<T> MakeFastArgs(const TTArgs<T>& args, const RowChunk& chunk) {
  const CudaPlan& layout = args.layout;
  const int core = layout.main;
  const Factors factors(args.shape, MakePivot(args.shape, core));
  const int left = factors.left, right = factors.right;
  FastArgs<T> fast;
  fast.tf32 = args.tensor_float32;
  fast.mirrored = left > right;
  fast.left = args.cores[left];
  fast.slices = args.cores[core];
  fast.right = args.cores[right];
  fast.log_a = factors.log_a;
  fast.log_q = factors.log_q;
  fast.log_b = factors.log_b;
  fast.rank = static_cast<int>(args.shape.r[core]);
  fast.plan = args.plan;
  fast.left_digit = layout.row_digit(left);
  fast.right_digit = layout.row_digit(right);
  fast.parts = layout.parts(core);
  fast.max_parts = layout.max_parts[core];
  fast.chunk = chunk;
  fast.tile_rows = static_cast<int>(layout.tile_rows);
  return fast;
}

bool No() { return false; }
Status NoSuchRank() { return Internal("this rank has no fast pass"); }

// fn(FastPasses) of a rank that has them; otherwise() of another.
template <typename Otherwise, typename Fn>
auto WithRank(int64_t rank, Otherwise otherwise, Fn fn) {
  switch (rank) {
#define JAX_TT_CASE(kRank) \
  case kRank:              \
    return fn(FastPasses<kRank>());
    JAX_TT_FAST_RANKS(JAX_TT_CASE)
#undef JAX_TT_CASE
    default:
      return otherwise();
  }
}

bool IsFast(const TTShape& shape, const Pivot& pivot) {
  const int64_t dim = shape.dim();
  if (shape.d != 3 || pivot.core != 1 || pivot.r_left != pivot.r_right) return false;
  if (!IsFactor(pivot.a) || !IsFactor(pivot.q) || !IsFactor(pivot.b) || dim < 16 || dim > 128) return false;
  return WithRank(pivot.r_left, No,
                  [&](auto passes) { return passes.Takes(pivot.q, pivot.left_first ? pivot.a : pivot.b); });
}

}  // namespace

FastTileSize FastTileOf(const TTShape& shape, const Pivot& pivot, int64_t n) {
  if (!IsFast(shape, pivot)) return {};
  const Factors factors(shape, pivot);
  const bool crowded = n / shape.p[pivot.core] >= shape.p[factors.left];
  return WithRank(
      pivot.r_left, [] { return FastTileSize{}; },
      [&](auto passes) -> FastTileSize {
        return {passes.TileRows(factors.log_a, factors.log_q, factors.log_b, crowded), kTileLines >> factors.log_a};
      });
}

Status HasFastPass(const TTShape& shape, const Pivot& pivot, bool* has) {
  *has = IsFast(shape, pivot);
  if (!*has) return {};
  size_t most = 0;
  JAX_TT_RETURN_IF_ERROR(MostShared(&most));
  *has = WithRank(pivot.r_left, No, [&](auto passes) { return passes.SharedBytes(static_cast<int>(pivot.q)) <= most; });
  return {};
}

template <typename T>
Status FastRowsPass(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, float* rows) {
  return WithRank(args.shape.r[1], NoSuchRank, [&](auto passes) -> Status {
    passes.Rows(queue, MakeFastArgs(args, chunk), rows);
    return {};
  });
}

template <typename T>
Status FastGradientPass(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* out_gradient,
                        const GradientShares& shares, const Cleared& cleared) {
  const CudaPlan& layout = args.layout;
  const BagGradients gradients{out_gradient, args.weights, layout.order(), layout.bag(), layout.row_begin()};
  FastShares<T> fast{MakeFastArgs(args, chunk), gradients, shares, cleared};
  if (fast.args.mirrored) std::swap(fast.shares.left, fast.shares.right);
  return WithRank(args.shape.r[1], NoSuchRank, [&](auto passes) -> Status {
    passes.Shares(queue, fast);
    return {};
  });
}

#define JAX_TT_INSTANTIATE(T)                                                                    \
  template Status FastRowsPass(TableQueue&, const TTArgs<T>&, const RowChunk&, float*);          \
  template Status FastGradientPass(TableQueue&, const TTArgs<T>&, const RowChunk&, const float*, \
                                   const GradientShares&, const Cleared&)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
