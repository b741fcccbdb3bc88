#include <algorithm>

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/tt_bags.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
// Sorted positions that one warp adds up; a row with more is added up from the sums of several warps.
constexpr int64_t kSpan = 32;
constexpr int64_t kMaxBlocks = 8448;  // fills the largest GPU several times

int64_t Blocks(int64_t warps) { return std::clamp<int64_t>((warps + kWarps - 1) / kWarps, 1, kMaxBlocks); }

// What every kernel here is given.
struct BagArgs {
  CudaPlan layout;
  PlanRef plan;
  RowChunk chunk;
  const float* weights;
  const int32_t* offsets;
  int64_t capacity, bags, num_bags, dim;
};

template <typename T>
BagArgs MakeBagArgs(const TTArgs<T>& args, const RowChunk& chunk) {
  return {args.layout,     args.plan,     chunk,     args.weights,
          args.offsets,    args.capacity, args.bags, args.groups * args.bags,
          args.shape.dim()};
}

__device__ __forceinline__ int64_t Warp() { return blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / 32; }
__device__ __forceinline__ int64_t NumWarps() { return gridDim.x * static_cast<int64_t>(kWarps); }

__device__ __forceinline__ float Weight(const BagArgs& args, int64_t position) {
  return args.weights == nullptr ? 1.0f : args.weights[position];
}

__global__ void __launch_bounds__(kThreads) Pool(const __grid_constant__ BagArgs args, const float* rows, float* out) {
  const int32_t* plan = args.plan.get();
  const int lane = threadIdx.x % 32;
  for (int64_t bag = Warp(); bag < args.num_bags; bag += NumWarps()) {
    const int64_t group = bag / args.bags;
    const int32_t* offsets = args.offsets + group * (args.bags + 1) + bag % args.bags;
    // Offsets that are out of order are noticed by the plan; here they must only not lead astray.
    const int64_t begin = group * args.capacity + max(offsets[0], 0);
    const int64_t end = group * args.capacity + min(static_cast<int64_t>(offsets[1]), args.capacity);
    bool poisoned = plan[CudaPlan::kBroken] != 0;
    for (int64_t position = begin + lane; position < end; position += 32)
      poisoned |= plan[args.layout.bag() + position] == CudaPlan::kPoisoned;
    poisoned = __any_sync(kAllLanes, poisoned);
    for (int64_t first = 0; first < args.dim; first += 32) {
      const int64_t column = first + lane;
      const bool inside = column < args.dim;
      float sum = inside && args.chunk.begin > 0 ? out[bag * args.dim + column] : 0.0f;
      for (int64_t base = begin; base < end; base += 32) {
        const int64_t own = base + lane;
        int32_t own_row = own < end ? plan[args.layout.row_of() + own] : -1;
        if (!args.chunk.holds(own_row)) own_row = -1;
        const float own_weight = own_row < 0 ? 0.0f : Weight(args, own);
        for (int i = 0; i < min(end - base, static_cast<int64_t>(32)); ++i) {
          const int64_t row = __shfl_sync(kAllLanes, own_row, i);
          const float weight = __shfl_sync(kAllLanes, own_weight, i);
          if (row >= 0 && inside) sum = fmaf(weight, rows[(row - args.chunk.begin) * args.dim + column], sum);
        }
      }
      if (inside) out[bag * args.dim + column] = poisoned ? __int_as_float(0x7fc00000) : sum;
    }
  }
}

// Sums of the rows that lie within a span of sorted positions.  Of a row that began before the span or goes on after
// it, carry[span] keeps the part: the first of two lines for the former, which also serves a span inside one row.
__global__ void __launch_bounds__(kThreads)
    SumSpans(const __grid_constant__ BagArgs args, const float* out_gradient, float* row_gradients, float* carry) {
  const int32_t* plan = args.plan.get();
  const CudaPlan& layout = args.layout;
  const int32_t* row_begin = plan + layout.row_begin();
  const int lane = threadIdx.x % 32;
  const int64_t chunk_end = min(args.chunk.end, static_cast<int64_t>(plan[CudaPlan::kRows]));
  if (args.chunk.begin >= chunk_end) return;
  const int64_t last = row_begin[chunk_end];
  for (int64_t span = row_begin[args.chunk.begin] / kSpan + Warp(); span * kSpan < last; span += NumWarps()) {
    const int64_t begin = span * kSpan, count = min(kSpan, last - begin);
    const int64_t own = plan[layout.order() + begin + min(static_cast<int64_t>(lane), count - 1)];
    const int32_t own_row = plan[layout.row_of() + own], own_bag = plan[layout.bag() + own];
    const float own_weight = Weight(args, own);
    for (int64_t first = 0; first < args.dim; first += 32) {
      const int64_t column = first + lane;
      const bool inside = column < args.dim;
      float sum = 0;
      for (int i = 0; i < count; ++i) {
        const int64_t row = __shfl_sync(kAllLanes, own_row, i), bag = __shfl_sync(kAllLanes, own_bag, i);
        const float weight = __shfl_sync(kAllLanes, own_weight, i);
        const int64_t next = __shfl_sync(kAllLanes, own_row, i + 1 < count ? i + 1 : i);
        if (inside) sum = fmaf(weight, out_gradient[bag * args.dim + column], sum);
        if (i + 1 < count && next == row) continue;
        const bool whole = row_begin[row] >= begin && row_begin[row + 1] <= begin + kSpan;
        const int64_t line = 2 * span + (row_begin[row] >= begin ? 1 : 0);
        float* target = whole ? row_gradients + (row - args.chunk.begin) * args.dim : carry + line * args.dim;
        if (inside && args.chunk.holds(row)) target[column] = sum;
        sum = 0;
      }
    }
  }
}

// Rows of several spans, each added up by the warp of the span that it begins in.
__global__ void __launch_bounds__(kThreads)
    JoinSpans(const __grid_constant__ BagArgs args, const float* carry, float* row_gradients) {
  const int32_t* plan = args.plan.get();
  const int32_t* row_begin = plan + args.layout.row_begin();
  const int64_t chunk_end = min(args.chunk.end, static_cast<int64_t>(plan[CudaPlan::kRows]));
  if (args.chunk.begin >= chunk_end) return;
  const int64_t last = row_begin[chunk_end];
  for (int64_t span = row_begin[args.chunk.begin] / kSpan + Warp(); (span + 1) * kSpan < last; span += NumWarps()) {
    const int64_t end = (span + 1) * kSpan;
    const int64_t row = plan[args.layout.row_of() + plan[args.layout.order() + end - 1]];
    if (!args.chunk.holds(row) || row_begin[row] < span * kSpan || row_begin[row + 1] <= end) continue;
    const int64_t last_span = (row_begin[row + 1] - 1) / kSpan;
    for (int64_t column = threadIdx.x % 32; column < args.dim; column += 32) {
      float sum = carry[(2 * span + 1) * args.dim + column];
      for (int64_t s = span + 1; s <= last_span; ++s) sum += carry[2 * s * args.dim + column];
      row_gradients[(row - args.chunk.begin) * args.dim + column] = sum;
    }
  }
}

__global__ void __launch_bounds__(kThreads) DotWeights(const __grid_constant__ BagArgs args, const float* rows,
                                                       const float* out_gradient, float* weight_gradient) {
  const int32_t* plan = args.plan.get();
  const int lane = threadIdx.x % 32;
  for (int64_t position = Warp(); position < args.layout.n; position += NumWarps()) {
    const int64_t row = plan[args.layout.row_of() + position];
    if (!args.chunk.holds(row)) {
      if (row < 0 && args.chunk.begin == 0 && lane == 0) weight_gradient[position] = 0;
      continue;
    }
    const float* g = out_gradient + plan[args.layout.bag() + position] * args.dim;
    const float* values = rows + (row - args.chunk.begin) * args.dim;
    float sum = 0;
    for (int64_t column = lane; column < args.dim; column += 32) sum = fmaf(values[column], g[column], sum);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (lane == 0) weight_gradient[position] = sum;
  }
}

}  // namespace

template <typename T>
Status PoolRows(cudaStream_t stream, const TTArgs<T>& args, const RowChunk& chunk, const float* rows, float* out) {
  const BagArgs bags = MakeBagArgs(args, chunk);
  return Launch(stream, Blocks(bags.num_bags), kThreads, 0, Pool, bags, rows, out);
}

int64_t CarryFloats(int64_t n, int64_t dim) { return 2 * ((n + kSpan - 1) / kSpan) * dim; }

template <typename T>
Status GatherRowGradients(cudaStream_t stream, const TTArgs<T>& args, const RowChunk& chunk, const float* out_gradient,
                          float* row_gradients, float* workspace) {
  const BagArgs bags = MakeBagArgs(args, chunk);
  const int64_t blocks = Blocks((args.layout.n + kSpan - 1) / kSpan);
  JAX_TT_RETURN_IF_ERROR(Launch(stream, blocks, kThreads, 0, SumSpans, bags, out_gradient, row_gradients, workspace));
  return Launch(stream, blocks, kThreads, 0, JoinSpans, bags, static_cast<const float*>(workspace), row_gradients);
}

template <typename T>
Status WeightGradients(cudaStream_t stream, const TTArgs<T>& args, const RowChunk& chunk, const float* rows,
                       const float* out_gradient, float* weight_gradient) {
  return Launch(stream, Blocks(args.layout.n), kThreads, 0, DotWeights, MakeBagArgs(args, chunk), rows, out_gradient,
                weight_gradient);
}

#define JAX_TT_INSTANTIATE(T)                                                                                        \
  template Status PoolRows(cudaStream_t, const TTArgs<T>&, const RowChunk&, const float*, float*);                   \
  template Status GatherRowGradients(cudaStream_t, const TTArgs<T>&, const RowChunk&, const float*, float*, float*); \
  template Status WeightGradients(cudaStream_t, const TTArgs<T>&, const RowChunk&, const float*, const float*, float*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
