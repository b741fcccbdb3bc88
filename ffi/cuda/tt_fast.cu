#include <utility>

#include "ffi/cuda/shared_limit.h"
#include "ffi/cuda/tt_fast.h"
#include "ffi/cuda/tt_fast_passes.h"

namespace jax_tt {
namespace {

bool IsFactor(int64_t q) { return q == 2 || q == 4 || q == 8; }

template <typename T>
FastArgs<T> MakeFastArgs(const TTArgs<T>& args, const RowChunk& chunk) {
  const CudaPlan& layout = args.layout;
  const int core = layout.main;
  FastArgs<T> fast;
  fast.tf32 = args.tensor_float32;
  fast.mirrored = !MakePivot(args.shape, core).left_first;
  const int left = fast.mirrored ? 2 : 0, right = 2 - left;
  fast.left = args.cores[left];
  fast.slices = args.cores[core];
  fast.right = args.cores[right];
  fast.log_a = Log2(static_cast<int>(args.shape.q[left]));
  fast.log_q = Log2(static_cast<int>(args.shape.q[core]));
  fast.log_b = Log2(static_cast<int>(args.shape.q[right]));
  fast.rank = static_cast<int>(args.shape.r[core]);
  fast.plan = args.plan;
  fast.left_digit = layout.row_digit(left);
  fast.right_digit = layout.row_digit(right);
  fast.segment = layout.segment(core);
  fast.first_part = layout.first_part(core);
  fast.part_slice = layout.part_slice(core);
  fast.num_parts = CudaPlan::kParts + core;
  fast.part_rows = layout.part_rows[core];
  fast.chunk = chunk;
  return fast;
}

// fn(FastPasses) of the table's rank.
template <typename Fn>
auto WithRank(const TTShape& shape, Fn fn) {
  switch (shape.r[1]) {
    case 16:
      return fn(FastPasses<16>());
    case 32:
      return fn(FastPasses<32>());
    case 64:
      return fn(FastPasses<64>());
    default:
      return fn(FastPasses<128>());
  }
}

bool IsFast(const TTShape& shape, const Pivot& pivot) {
  const int64_t r = pivot.r_left, dim = shape.dim();
  if (shape.d != 3 || pivot.core != 1 || r != pivot.r_right) return false;
  if (!IsFactor(pivot.a) || !IsFactor(pivot.q) || !IsFactor(pivot.b) || dim < 16 || dim > 128) return false;
  // A block of columns has 64 or 128 of them, and a prefix four lines in it.
  if (r == 16) return pivot.q >= 4;
  return r == 32 || r == 64 || (r == 128 && (pivot.left_first ? pivot.a : pivot.b) >= 4);
}

}  // namespace

Status HasFastPass(const TTShape& shape, const Pivot& pivot, bool* has) {
  *has = IsFast(shape, pivot);
  if (!*has) return {};
  size_t most = 0;
  JAX_TT_RETURN_IF_ERROR(MostShared(&most));
  *has = WithRank(shape, [&](auto passes) { return passes.SharedBytes(static_cast<int>(pivot.q)); }) <= most;
  return {};
}

template <typename T>
Status FastRowsPass(cudaStream_t stream, const TTArgs<T>& args, const RowChunk& chunk, float* rows) {
  return WithRank(args.shape, [&](auto passes) {
    return passes.Rows(stream, MakeFastArgs(args, chunk), args.layout.max_parts[args.layout.main], rows);
  });
}

template <typename T>
Status FastGradientPass(cudaStream_t stream, const TTArgs<T>& args, const RowChunk& chunk, const float* row_gradients,
                        const GradientShares& shares) {
  const FastArgs<T> fast = MakeFastArgs(args, chunk);
  GradientShares seen = shares;
  if (fast.mirrored) std::swap(seen.left, seen.right);
  return WithRank(args.shape, [&](auto passes) {
    return passes.Shares(stream, fast, args.layout.max_parts[args.layout.main], row_gradients, seen);
  });
}

#define JAX_TT_INSTANTIATE(T)                                                            \
  template Status FastRowsPass(cudaStream_t, const TTArgs<T>&, const RowChunk&, float*); \
  template Status FastGradientPass(cudaStream_t, const TTArgs<T>&, const RowChunk&, const float*, const GradientShares&)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
