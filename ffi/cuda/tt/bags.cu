#include <algorithm>

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/ids.h"
#include "ffi/cuda/tt/bags.h"
#include "ffi/cuda/tt/terms.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int64_t kMaxBlocks = 4224;  // fills the largest GPU several times
// Blocks of a batch, if it has as many sums.  Few sums are spread until a scheduler has a warp or less; where there are
// more, warps without a sum would only take the place of others.
constexpr int64_t kSpread = 64;

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

// Sums of lines of `from`: rows into bags, or gradients of bags into rows.
struct SumsArgs {
  BagArgs bags;
  const float* from;
  float* to;
  Cleared cleared;
  int lanes;     // that share a sum, with a column each or four, a power of two
  int together;  // sums that a block takes at once
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

// A sum of terms [begin, end), none where the end is not above the beginning, and the line that it is written to.
struct Sum {
  int32_t begin = 0, end = 0, line = -1;  // -1: there is none
  __device__ __forceinline__ int32_t size() const { return end - begin; }
};

// What the terms of a sum are is read in two steps, a word of each and what that leads to, so that the words of many
// are on their way before the first of them is looked at.

// The sums of bags, over their positions.
struct BagSums {
  // Terms that a lane adds up one after the other at most; longer sums are those of blocks.  Up to here, ids that read
  // nothing leave the bits of a sum as they are.
  static constexpr int32_t kShort = 128;
  static constexpr int kAhead = 5;  // terms that a lane asks for at once
  const BagArgs& args;
  const int32_t* plan;

  __device__ __forceinline__ int64_t count() const { return args.num_bags; }
  // Offsets that are out of order are noticed by the plan; here they must only not lead astray.
  __device__ __forceinline__ Sum At(int64_t bag) const {
    const int64_t group = args.bags == args.num_bags ? 0 : bag / args.bags, base = group * args.capacity;
    const int32_t* offsets = args.offsets + group * (args.bags + 1) + (bag - group * args.bags);
    const auto place = [&](int32_t offset) {
      return static_cast<int32_t>(base + min(static_cast<int64_t>(max(offset, 0)), args.capacity));
    };
    return {place(offsets[0]), place(offsets[1]), static_cast<int32_t>(bag)};
  }
  // The row of a position.
  __device__ __forceinline__ int32_t WordAt(int32_t position) const { return plan[args.layout.row_of() + position]; }
  __device__ __forceinline__ Term TermAt(int32_t position, int32_t row) const {
    const int32_t begin = static_cast<int32_t>(args.chunk.begin), end = static_cast<int32_t>(args.chunk.end);
    Term term;
    if (row >= begin && row < end) term = {row - begin, Weight(args, position)};
    // An id that makes NaN of its bag is a term that does.
    if (row < 0 && begin == 0 && plan[args.layout.bag() + position] == CudaPlan::kPoisoned)
      term.weight = __int_as_float(0x7fc00000);
    return term;
  }
  __device__ __forceinline__ bool adds() const { return args.chunk.begin > 0; }
  __device__ __forceinline__ bool spoils() const { return plan[CudaPlan::kBroken] != 0; }
};

// The sums of the gradients of rows, over their places in the order of positions.
struct RowSums {
  static constexpr int32_t kShort = 32;
  static constexpr int kAhead = 4;  // most rows have few
  const BagArgs& args;
  const int32_t* plan;

  __device__ __forceinline__ int64_t count() const { return plan[CudaPlan::kValid]; }
  __device__ __forceinline__ Sum At(int64_t place) const {
    const int32_t row = plan[args.layout.row_head() + plan[args.layout.order() + place]];
    if (!args.chunk.holds(row)) return {};
    return {static_cast<int32_t>(place), plan[args.layout.row_begin() + row + 1],
            static_cast<int32_t>(row - args.chunk.begin)};
  }
  // The position at a place.
  __device__ __forceinline__ int32_t WordAt(int32_t place) const { return plan[args.layout.order() + place]; }
  __device__ __forceinline__ Term TermAt(int32_t, int32_t position) const {
    return {plan[args.layout.bag() + position], Weight(args, position)};
  }
  __device__ __forceinline__ bool adds() const { return false; }
  __device__ __forceinline__ bool spoils() const { return false; }
};

template <int kWidth, typename Sums>
__device__ __forceinline__ void Finish(const Sums& sums, float* to, Columns<kWidth>& sum) {
  if (sums.adds()) {
    Columns<kWidth> before;
    before.Load(to);
    sum.Add(1.0f, before);
  }
  if (sums.spoils())
    for (float& value : sum.value) value = __int_as_float(0x7fc00000);
  sum.Store(to);
}

// The sum of many terms.  A block reads as many at a time as it has threads; its groups of lanes have equal shares of
// them, whatever else is in the batch, and their sums are added in order.
template <int kWidth, typename Sums>
__device__ void SumByBlock(const SumsArgs& args, const Sums& sums, const Sum& own, Shared<int32_t> lines,
                           Shared<float> weights, Shared<float> packets) {
  const int64_t dim = args.bags.dim;
  const int lanes = args.lanes, lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = kThreads / lanes;
  for (int64_t first = 0; first < dim; first += lanes * kWidth) {
    const int64_t column = first + lane * kWidth;
    const bool inside = column < dim;
    Columns<kWidth> sum, lost;
    for (int32_t base = own.begin; base < own.end; base += kThreads) {
      const int32_t place = base + static_cast<int32_t>(threadIdx.x);
      const Term term = place < own.end ? sums.TermAt(place, sums.WordAt(place)) : Term{};
      lines[threadIdx.x] = term.line;
      weights[threadIdx.x] = term.weight;
      __syncthreads();
      if (inside) {
        Columns<kWidth> part;
        AddTerms<Sums::kAhead>(
            args.from + column, dim, group * lanes, (group + 1) * lanes,
            [&](int64_t i) { return Term{lines[i], weights[i]}; }, part);
        for (int i = 0; i < kWidth; ++i) AddExactly(part.value[i], &sum.value[i], &lost.value[i]);
      }
      __syncthreads();
    }
    for (int i = 0; i < kWidth; ++i) sum.value[i] = ExactSum(sum.value[i], lost.value[i]);
    for (int i = 0; i < kWidth; ++i) packets[i * kThreads + threadIdx.x] = sum.value[i];
    __syncthreads();
    if (group == 0 && inside) {
      for (int other = 1; other < groups; ++other)
        for (int i = 0; i < kWidth; ++i) sum.value[i] += packets[i * kThreads + other * lanes + lane];
      Finish(sums, args.to + int64_t{own.line} * dim + column, sum);
    }
    __syncthreads();
  }
}

// The sum of few terms, in order.
template <int kWidth, typename Sums>
__device__ __forceinline__ void AddShort(const float* from, int dim, const Sums& sums, const Sum& own,
                                         Columns<kWidth>& sum) {
  constexpr int kAhead = Sums::kAhead;
  int32_t words[kAhead] = {};
  const auto ask = [&](int32_t base) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (base + k < own.end) words[k] = sums.WordAt(base + k);
  };
  ask(own.begin);
  for (int32_t base = own.begin; base < own.end; base += kAhead) {
    Term terms[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (base + k < own.end) terms[k] = sums.TermAt(base + k, words[k]);
    // The next words come while these lines do.
    ask(base + kAhead);
    AddTerms<kAhead>(from, dim, 0, kAhead, [&](int64_t k) { return terms[k]; }, sum);
  }
}

// A sum for each group of lanes, except for the long ones, which the block takes one after the other.
template <int kWidth, typename Sums>
__device__ void MakeSums(const BlockOfTable& block, const SumsArgs& args, const Sums& sums) {
  SharedArena arena;
  const Shared<int32_t> lines = arena.Take<int32_t>(kThreads), longs = arena.Take<int32_t>(kThreads);
  const Shared<float> weights = arena.Take<float>(kThreads), packets = arena.Take<float>(kWidth * kThreads);
  const int64_t dim = args.bags.dim, count = sums.count();
  const int lanes = args.lanes, together = args.together, group = static_cast<int>(threadIdx.x) >> (__ffs(lanes) - 1);
  for (int64_t base = block.index * together; base < count; base += block.count * together) {
    const Sum own = group < together && base + group < count ? sums.At(base + group) : Sum{};
    const bool is_long = own.line >= 0 && own.size() > Sums::kShort;
    if (own.line >= 0 && !is_long) {
      for (int64_t column = (threadIdx.x & (lanes - 1)) * kWidth; column < dim; column += lanes * kWidth) {
        Columns<kWidth> sum;
        AddShort(args.from + column, static_cast<int>(dim), sums, own, sum);
        Finish(sums, args.to + int64_t{own.line} * dim + column, sum);
      }
    }
    if (!__syncthreads_or(is_long)) continue;
    if (group < together && (threadIdx.x & (lanes - 1)) == 0) longs[group] = is_long;
    __syncthreads();
    for (int other = 0; other < together; ++other)
      if (longs[other]) SumByBlock<kWidth>(args, sums, sums.At(base + other), lines, weights, packets);
    __syncthreads();
  }
}

template <int kWidth, typename Sums, typename Tables>
__global__ void __launch_bounds__(kThreads, 2) SumLines(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const SumsArgs& args = tables.Find(&block);
  args.cleared.Clear(block);
  MakeSums<kWidth>(block, args, Sums{args.bags, args.bags.plan.get()});
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

template <int kWidth, typename Sums>
constexpr TableKernel kSumLines = TableKernelOf<SumsArgs, SumLines<kWidth, Sums, OneTable<SumsArgs>>,
                                                SumLines<kWidth, Sums, ManyTables<SumsArgs>>, kThreads>::kKernel;
constexpr TableKernel kDotWeights =
    TableKernelOf<WeightArgs, DotWeights<OneTable<WeightArgs>>, DotWeights<ManyTables<WeightArgs>>, kThreads>::kKernel;

// Adds the launch of `count` sums at most.  How a sum is divided depends on its size alone, not on the batch.
template <typename Sums>
void AddSums(TableQueue& queue, SumsArgs sums, int64_t count) {
  const int64_t dim = sums.bags.dim;
  const int width = dim % 4 == 0 ? 4 : 1;
  sums.lanes = 1;
  while (sums.lanes < 32 && sums.lanes * width < dim) sums.lanes *= 2;
  sums.together = static_cast<int>(std::clamp<int64_t>(count / kSpread, 1, kThreads / sums.lanes));
  const int64_t blocks = std::min((count + sums.together - 1) / sums.together, kMaxBlocks);
  const size_t shared = 2 * SharedBytes<int32_t>(kThreads) + SharedBytes<float>(kThreads) +
                        SharedBytes<float>(static_cast<int64_t>(width) * kThreads);
  queue.Add(width == 4 ? kSumLines<4, Sums> : kSumLines<1, Sums>, blocks, shared, sums);
}

}  // namespace

template <typename T>
void PoolRows(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* rows, float* out) {
  AddSums<BagSums>(queue, {MakeBagArgs(args, chunk), rows, out, {}, 1, 1}, args.groups * args.bags);
}

template <typename T>
void GatherRowGradients(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* out_gradient,
                        float* row_gradients, const Cleared& cleared) {
  // At least one block, for the words.
  AddSums<RowSums>(queue, {MakeBagArgs(args, chunk), out_gradient, row_gradients, cleared, 1, 1},
                   std::max<int64_t>(args.layout.n, 1));
}

template <typename T>
void WeightGradients(TableQueue& queue, const TTArgs<T>& args, const RowChunk& chunk, const float* rows,
                     const float* out_gradient, float* weight_gradient) {
  const int64_t blocks = std::min((args.layout.n + kWarps - 1) / kWarps, kMaxBlocks);
  queue.Add(kDotWeights, blocks, 0, WeightArgs{MakeBagArgs(args, chunk), rows, out_gradient, weight_gradient});
}

#define JAX_TT_INSTANTIATE(T)                                                                            \
  template void PoolRows(TableQueue&, const TTArgs<T>&, const RowChunk&, const float*, float*);          \
  template void GatherRowGradients(TableQueue&, const TTArgs<T>&, const RowChunk&, const float*, float*, \
                                   const Cleared&);                                                      \
  template void WeightGradients(TableQueue&, const TTArgs<T>&, const RowChunk&, const float*, const float*, float*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
