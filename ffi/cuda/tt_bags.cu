#include <algorithm>

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/ids.h"
#include "ffi/cuda/tt_bags.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
// Of a block that adds up the sums of spans.
constexpr int kJoinThreads = 256, kJoinWarps = kJoinThreads / 32;
// Sorted positions that one warp adds up; a row with more is added up from the sums of several warps.
constexpr int64_t kSpan = 32;
// The same for the positions of a bag, which are cut into spans only if there are more.
constexpr int64_t kBagSpan = 128;
// Spans of a row that one warp joins; more are joined by a block.
constexpr int64_t kWarpSpans = 16;
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

// Pooling: rows, and what each bag gets.
struct PoolArgs {
  BagArgs bags;
  const float* rows;
  float *out, *spans;
  int64_t lines;
};

// The gradients of rows from those of bags.
struct GatherArgs {
  BagArgs bags;
  const float* out_gradient;
  float *row_gradients, *carry;
};

struct WeightArgs {
  BagArgs bags;
  const float *rows, *out_gradient;
  float* weight_gradient;
};

__device__ __forceinline__ int64_t Warp(const BlockOfTable& block) { return block.index * kWarps + threadIdx.x / 32; }
__device__ __forceinline__ int64_t NumWarps(const BlockOfTable& block) { return block.count * kWarps; }

__device__ __forceinline__ float Weight(const BagArgs& args, int64_t position) {
  return args.weights == nullptr ? 1.0f : args.weights[position];
}

// Some of the positions of a bag; none where the end is not above the beginning.
struct Run {
  int64_t begin = 0, end = 0;
  __device__ __forceinline__ int64_t size() const { return end - begin; }
};

// All positions of a bag.  Offsets that are out of order are noticed by the plan; here they must only not lead astray.
__device__ __forceinline__ Run BagRun(const BagArgs& args, int64_t group, int64_t bag) {
  const int32_t* offsets = args.offsets + group * (args.bags + 1) + bag;
  return {group * args.capacity + max(offsets[0], 0),
          group * args.capacity + min(static_cast<int64_t>(offsets[1]), args.capacity)};
}
__device__ __forceinline__ Run BagRun(const BagArgs& args, int64_t bag) {
  return BagRun(args, bag / args.bags, bag % args.bags);
}

// The spans of a long bag are counted from where it begins, so that its sum is the same whatever bags come before it.
// The sum of the first one is kept in line 2 s + 1 where the bag begins in [s, s + 1) kBagSpan, those of the others in
// the lines 2 (s + 1), 2 (s + 2), ... after it: no two spans have the same line, since long bags are longer than that.
__device__ __forceinline__ Run SpanOfLine(const BagArgs& args, int64_t line) {
  const int64_t slot = line / 2 * kBagSpan;
  const bool is_first = line % 2 != 0;
  // A long bag that begins in this slot goes on beyond it, and one that began before holds its start.
  const int64_t inside = is_first ? min(slot + kBagSpan, args.layout.n) - 1 : slot;
  const int64_t group = inside / args.capacity;
  const int32_t bag = FindBag(args.offsets + group * (args.bags + 1), args.bags, inside - group * args.capacity);
  if (bag < 0) return {};
  const Run run = BagRun(args, group, bag);
  if (run.size() <= kBagSpan || is_first != (run.begin >= slot)) return {};
  const int64_t begin = run.begin + (is_first ? 0 : (slot - run.begin + kBagSpan - 1) / kBagSpan * kBagSpan);
  return {begin, min(begin + kBagSpan, run.end)};
}

// A warp's sum of the rows of a run, in order, NaN where the run holds an id that makes NaN of its bag.
__device__ __forceinline__ void SumRun(const BagArgs& args, const int32_t* plan, const Run& run, const float* rows,
                                       bool add, float* out) {
  const int lane = threadIdx.x % 32;
  bool poisoned = plan[CudaPlan::kBroken] != 0;
  for (int64_t position = run.begin + lane; position < run.end; position += 32)
    poisoned |= plan[args.layout.bag() + position] == CudaPlan::kPoisoned;
  poisoned = __any_sync(kAllLanes, poisoned);
  for (int64_t first = 0; first < args.dim; first += 32) {
    const int64_t column = first + lane;
    const bool inside = column < args.dim;
    float sum = inside && add ? out[column] : 0.0f;
    for (int64_t base = run.begin; base < run.end; base += 32) {
      const int64_t own = base + lane;
      int32_t own_row = own < run.end ? plan[args.layout.row_of() + own] : -1;
      if (!args.chunk.holds(own_row)) own_row = -1;
      const float own_weight = own_row < 0 ? 0.0f : Weight(args, own);
      const int count = static_cast<int>(min(run.end - base, static_cast<int64_t>(32)));
      for (int i = 0; i < count; ++i) {
        const int64_t row = __shfl_sync(kAllLanes, own_row, i);
        const float weight = __shfl_sync(kAllLanes, own_weight, i);
        if (row >= 0 && inside) sum = fmaf(weight, rows[(row - args.chunk.begin) * args.dim + column], sum);
      }
    }
    if (inside) out[column] = poisoned ? __int_as_float(0x7fc00000) : sum;
  }
}

// The bags that are not long, then the spans of those that are, by line.
template <typename Tables>
__global__ void __launch_bounds__(kThreads) Pool(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const PoolArgs& pool = tables.Find(&block);
  const BagArgs& args = pool.bags;
  const int32_t* plan = args.plan.get();
  for (int64_t item = Warp(block); item < args.num_bags + pool.lines; item += NumWarps(block)) {
    if (item < args.num_bags) {
      const Run run = BagRun(args, item);
      if (run.size() <= kBagSpan) SumRun(args, plan, run, pool.rows, args.chunk.begin > 0, pool.out + item * args.dim);
    } else {
      const int64_t line = item - args.num_bags;
      const Run run = SpanOfLine(args, line);
      if (run.size() > 0) SumRun(args, plan, run, pool.rows, false, pool.spans + line * args.dim);
    }
  }
}

// fn(column, sum) with the sum of line 2 first + 1 and of the even lines from there to 2 last; each column by one
// thread.  Groups of threads take equal runs of lines, whose sums are added in order.  For all threads of a block.
template <typename Fn>
__device__ __forceinline__ void JoinLines(const float* lines, int64_t first, int64_t last, int64_t dim,
                                          Shared<float> sums, Fn fn) {
  const int groups = dim < kJoinThreads ? static_cast<int>(kJoinThreads / dim) : 1;
  const int group = groups == 1 ? 0 : static_cast<int>(threadIdx.x / dim);
  const int64_t each = (last - first + groups - 1) / groups;
  const int64_t begin = first + 1 + group * each, end = min(last + 1, begin + each);
  for (int64_t base = 0; base < dim; base += kJoinThreads) {
    const int64_t column = groups == 1 ? base + threadIdx.x : threadIdx.x % dim;
    const bool works = group < groups && column < dim;
    float sum = group == 0 && works ? lines[(2 * first + 1) * dim + column] : 0.0f;
    if (works) {
#pragma unroll 8
      for (int64_t line = begin; line < end; ++line) sum += lines[2 * line * dim + column];
    }
    if (groups > 1) {
      sums[threadIdx.x] = sum;
      __syncthreads();
      if (group == 0 && works)
        for (int g = 1; g < groups; ++g) sum += sums[g * dim + column];
      __syncthreads();
    }
    if (group == 0 && works) fn(column, sum);
  }
}

// The bags that are long, a block for each.
template <typename Tables>
__global__ void __launch_bounds__(kJoinThreads) JoinBags(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const PoolArgs& pool = tables.Find(&block);
  const BagArgs& args = pool.bags;
  SharedArena arena;
  const Shared<float> sums = arena.Take<float>(kJoinThreads);
  const bool broken = args.plan.get()[CudaPlan::kBroken] != 0;
  for (int64_t bag = block.index; bag < args.num_bags; bag += block.count) {
    const Run run = BagRun(args, bag);
    if (run.size() <= kBagSpan) continue;
    const int64_t first = run.begin / kBagSpan, last = first + (run.size() - 1) / kBagSpan;
    JoinLines(pool.spans, first, last, args.dim, sums, [&](int64_t column, float sum) {
      float* to = pool.out + bag * args.dim + column;
      *to = broken ? __int_as_float(0x7fc00000) : args.chunk.begin > 0 ? *to + sum : sum;
    });
  }
}

// Sums of the rows that lie within a span of sorted positions.  Of a row that began before the span or goes on after
// it, carry[span] keeps the part: the first of two lines for the former, which also serves a span inside one row.
template <typename Tables>
__global__ void __launch_bounds__(kThreads) SumSpans(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const GatherArgs& gather = tables.Find(&block);
  const BagArgs& args = gather.bags;
  const int32_t* plan = args.plan.get();
  const CudaPlan& layout = args.layout;
  const int32_t* row_begin = plan + layout.row_begin();
  const int lane = threadIdx.x % 32;
  const int64_t chunk_end = min(args.chunk.end, static_cast<int64_t>(plan[CudaPlan::kRows]));
  if (args.chunk.begin >= chunk_end) return;
  const int64_t last = row_begin[chunk_end];
  for (int64_t span = row_begin[args.chunk.begin] / kSpan + Warp(block); span * kSpan < last; span += NumWarps(block)) {
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
        if (inside) sum = fmaf(weight, gather.out_gradient[bag * args.dim + column], sum);
        if (i + 1 < count && next == row) continue;
        const bool whole = row_begin[row] >= begin && row_begin[row + 1] <= begin + kSpan;
        const int64_t line = 2 * span + (row_begin[row] >= begin ? 1 : 0);
        float* target =
            whole ? gather.row_gradients + (row - args.chunk.begin) * args.dim : gather.carry + line * args.dim;
        if (inside && args.chunk.holds(row)) target[column] = sum;
        sum = 0;
      }
    }
  }
}

// The row that begins in a span and goes on after it, if there is one in this chunk.
struct SpannedRow {
  int64_t row = -1, last_span = 0;

  __device__ __forceinline__ SpannedRow(const BagArgs& args, const int32_t* plan, int64_t span, int64_t last) {
    const int32_t* row_begin = plan + args.layout.row_begin();
    const int64_t end = (span + 1) * kSpan;
    if (end >= last) return;
    const int64_t at_end = plan[args.layout.row_of() + plan[args.layout.order() + end - 1]];
    if (!args.chunk.holds(at_end) || row_begin[at_end] < span * kSpan || row_begin[at_end + 1] <= end) return;
    row = at_end;
    last_span = (row_begin[at_end + 1] - 1) / kSpan;
  }
};

// Rows of several spans, each added up by the warp of the span that it begins in, or, where there are many, by all of
// its block.
template <typename Tables>
__global__ void __launch_bounds__(kJoinThreads) JoinSpans(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const GatherArgs& gather = tables.Find(&block);
  const BagArgs& args = gather.bags;
  const float* carry = gather.carry;
  float* row_gradients = gather.row_gradients;
  SharedArena arena;
  const Shared<float> sums = arena.Take<float>(kJoinThreads);
  const int32_t* plan = args.plan.get();
  const int32_t* row_begin = plan + args.layout.row_begin();
  const int64_t chunk_end = min(args.chunk.end, static_cast<int64_t>(plan[CudaPlan::kRows]));
  if (args.chunk.begin >= chunk_end) return;
  const int64_t last = row_begin[chunk_end], first_span = row_begin[args.chunk.begin] / kSpan;
  for (int64_t base = first_span + block.index * kJoinWarps; (base + 1) * kSpan < last;
       base += block.count * kJoinWarps) {
    const int64_t span = base + threadIdx.x / 32;
    const SpannedRow own(args, plan, span, last);
    const bool many = own.row >= 0 && own.last_span - span > kWarpSpans;
    if (own.row >= 0 && !many) {
      for (int64_t column = threadIdx.x % 32; column < args.dim; column += 32) {
        float sum = carry[(2 * span + 1) * args.dim + column];
        for (int64_t s = span + 1; s <= own.last_span; ++s) sum += carry[2 * s * args.dim + column];
        row_gradients[(own.row - args.chunk.begin) * args.dim + column] = sum;
      }
    }
    if (!__syncthreads_or(many)) continue;
    for (int64_t other = base; other < base + kJoinWarps; ++other) {
      const SpannedRow long_row(args, plan, other, last);
      if (long_row.row < 0 || long_row.last_span - other <= kWarpSpans) continue;
      float* to = row_gradients + (long_row.row - args.chunk.begin) * args.dim;
      JoinLines(carry, other, long_row.last_span, args.dim, sums, [&](int64_t column, float sum) { to[column] = sum; });
    }
  }
}

template <typename Tables>
__global__ void __launch_bounds__(kThreads) DotWeights(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const WeightArgs& own = tables.Find(&block);
  const BagArgs& args = own.bags;
  const int32_t* plan = args.plan.get();
  const int lane = threadIdx.x % 32;
  for (int64_t position = Warp(block); position < args.layout.n; position += NumWarps(block)) {
    const int64_t row = plan[args.layout.row_of() + position];
    if (!args.chunk.holds(row)) {
      if (row < 0 && args.chunk.begin == 0 && lane == 0) {
        const bool poisoned = plan[args.layout.bag() + position] == CudaPlan::kPoisoned;
        own.weight_gradient[position] = poisoned ? __int_as_float(0x7fc00000) : 0.0f;
      }
      continue;
    }
    const float* g = own.out_gradient + plan[args.layout.bag() + position] * args.dim;
    const float* values = own.rows + (row - args.chunk.begin) * args.dim;
    float sum = 0;
    for (int64_t column = lane; column < args.dim; column += 32) sum = fmaf(values[column], g[column], sum);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (lane == 0) own.weight_gradient[position] = sum;
  }
}

// Two for every slot that a span can begin in; none where no bag can be long.
int64_t SpanLines(int64_t n, int64_t longest) { return longest <= kBagSpan ? 0 : 2 * ((n + kBagSpan - 1) / kBagSpan); }

constexpr TableKernel kPool =
    TableKernelOf<PoolArgs, Pool<OneTable<PoolArgs>>, Pool<ManyTables<PoolArgs>>, kThreads>::kKernel;
constexpr TableKernel kJoinBags =
    TableKernelOf<PoolArgs, JoinBags<OneTable<PoolArgs>>, JoinBags<ManyTables<PoolArgs>>, kJoinThreads>::kKernel;
constexpr TableKernel kSumSpans =
    TableKernelOf<GatherArgs, SumSpans<OneTable<GatherArgs>>, SumSpans<ManyTables<GatherArgs>>, kThreads>::kKernel;
constexpr TableKernel kJoinSpans = TableKernelOf<GatherArgs, JoinSpans<OneTable<GatherArgs>>,
                                                 JoinSpans<ManyTables<GatherArgs>>, kJoinThreads>::kKernel;
constexpr TableKernel kDotWeights =
    TableKernelOf<WeightArgs, DotWeights<OneTable<WeightArgs>>, DotWeights<ManyTables<WeightArgs>>, kThreads>::kKernel;

}  // namespace

int64_t PoolFloats(int64_t n, int64_t dim) { return SpanLines(n, n) * dim; }

template <typename T>
void PoolRows(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* rows, float* out,
              float* workspace) {
  const PoolArgs pool{MakeBagArgs(args, chunk), rows, out, workspace, SpanLines(args.layout.n, args.capacity)};
  queue.Add(kPool, Blocks(pool.bags.num_bags + pool.lines), 0, pool);
  if (pool.lines > 0)
    queue.Add(kJoinBags, std::min(pool.bags.num_bags, kMaxBlocks), SharedBytes<float>(kJoinThreads), pool);
}

int64_t CarryFloats(int64_t n, int64_t dim) { return 2 * ((n + kSpan - 1) / kSpan) * dim; }

template <typename T>
void GatherRowGradients(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* out_gradient,
                        float* row_gradients, float* workspace) {
  const GatherArgs gather{MakeBagArgs(args, chunk), out_gradient, row_gradients, workspace};
  const int64_t blocks = Blocks((args.layout.n + kSpan - 1) / kSpan);
  queue.Add(kSumSpans, blocks, 0, gather);
  queue.Add(kJoinSpans, blocks, SharedBytes<float>(kJoinThreads), gather);
}

template <typename T>
void WeightGradients(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* rows,
                     const float* out_gradient, float* weight_gradient) {
  queue.Add(kDotWeights, Blocks(args.layout.n), 0,
            WeightArgs{MakeBagArgs(args, chunk), rows, out_gradient, weight_gradient});
}

#define JAX_TT_INSTANTIATE(T)                                                                                     \
  template void PoolRows(TableQueue&, const TTArgs<T>&, const RowChunk&, const float*, float*, float*);           \
  template void GatherRowGradients(TableQueue&, const TTArgs<T>&, const RowChunk&, const float*, float*, float*); \
  template void WeightGradients(TableQueue&, const TTArgs<T>&, const RowChunk&, const float*, const float*, float*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
