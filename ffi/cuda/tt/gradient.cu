#include <algorithm>

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/rules/rule_launches.h"
#include "ffi/cuda/tt/step.h"

namespace jax_tt {
namespace {

constexpr int64_t kMaxBlocks = 8448;  // fills the largest GPU several times

template <typename Tables>
__global__ void __launch_bounds__(kSliceThreads) SumSlices(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const SumArgs& args = tables.Find(&block);
  SharedArena arena;
  const Shared<float> sums = arena.Take<float>(kSliceThreads);
  const int index = static_cast<int>(block.index);
  const int32_t* plan = args.plan.get();
  const SliceSum sum(args, plan, index, PartOf(args, plan, index), /*divides=*/true, sums,
                     arena.Take<int32_t>(kSliceThreads + 1));
  if (!sum.exists()) return;
  float* gradient = args.gradients.core[sum.core()] + sum.slice() * sum.width();
  const bool first_chunk = args.chunk.begin == 0;
  if (sum.is_first() && threadIdx.x == 0) args.gradients.touched[args.slices[sum.core()] + sum.slice()] = 1;
  sum.ForEach([&](const ElementBatch& batch) {
    float before[ElementBatch::kCount] = {}, values[ElementBatch::kCount];
#pragma unroll
    for (int k = 0; k < ElementBatch::kCount; ++k)
      if (!first_chunk && batch.has(k)) before[k] = gradient[batch.at(k)];
    sum.Read(batch, values);
#pragma unroll
    for (int k = 0; k < ElementBatch::kCount; ++k)
      if (batch.has(k)) gradient[batch.at(k)] = first_chunk ? values[k] : before[k] + values[k];
  });
}

int64_t NumSlices(const TTShape& shape) {
  int64_t slices = 0;
  for (int k = 0; k < shape.d; ++k) slices += shape.p[k];
  return slices;
}

struct FiniteArgs {
  TTShape shape;
  CoreGradients gradients;
  int64_t slices;
  const float* scale;
  int32_t* stop;
};

template <typename Tables>
__global__ void __launch_bounds__(kSliceThreads) FindNonFinite(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const FiniteArgs& own = tables.Find(&block);
  for (int64_t index = block.index; index < own.slices; index += block.count) {
    if (!own.gradients.touched[index]) continue;
    const SliceOf at(own.shape, index);
    const int64_t width = own.shape.slice_size(at.core);
    const float* gradient = own.gradients.core[at.core] + at.slice * width;
    // A sum of products with zero is zero unless one of them is infinite or NaN.
    float probe = 0;
    for (int64_t e = threadIdx.x; e < width; e += kSliceThreads) probe += (*own.scale * gradient[e]) * 0.0f;
    if (!(probe == 0.0f)) atomicExch(own.stop, 1);
  }
}

constexpr TableKernel kSumSlices =
    TableKernelOf<SumArgs, SumSlices<OneTable<SumArgs>>, SumSlices<ManyTables<SumArgs>>, kSliceThreads>::kKernel;
constexpr TableKernel kFindNonFinite = TableKernelOf<FiniteArgs, FindNonFinite<OneTable<FiniteArgs>>,
                                                     FindNonFinite<ManyTables<FiniteArgs>>, kSliceThreads>::kKernel;

}  // namespace

void SumShares(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
               const RowChunk& chunk, const CoreShares& shares, const CoreGradients& gradients) {
  const SumArgs args(shape, layout, plan, chunk, shares, gradients);
  queue.Add(kSumSlices, args.blocks(), kSumShared, args);
}

template <typename T>
Status SumSharesAndStep(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
                        const CoreShares& shares, const CoreTables<T>& tables, const TTStep& step, float* applied) {
  const SumArgs args(shape, layout, plan, {0, layout.n}, shares, {});
  const RuleLaunches* launches = nullptr;
  JAX_TT_RETURN_IF_ERROR(FindLaunches(step.kind, &launches));
  queue.Add(launches->slices<T>().sum_and_step, std::max<int64_t>(args.blocks(), 1), kSumShared,
            SumAndStepArgs<T>{args, tables, step.numbers, applied});
  return {};
}

template <typename T>
Status ApplyStep(TableQueue& queue, const TTShape& shape, const PlanRef& plan, const CoreTables<T>& tables,
                 const CoreGradients& gradients, const TTStep& step, int32_t* stop, float* applied) {
  const int64_t slices = NumSlices(shape), blocks = std::min(slices, kMaxBlocks);
  if (step.skip_nonfinite) {
    queue.Clear(stop, 1);
    queue.Add(kFindNonFinite, blocks, 0, FiniteArgs{shape, gradients, slices, step.numbers.scale, stop});
  }
  const int32_t* stops = step.skip_nonfinite ? stop : nullptr;
  const RuleLaunches* launches = nullptr;
  JAX_TT_RETURN_IF_ERROR(FindLaunches(step.kind, &launches));
  queue.Add(launches->slices<T>().step, blocks, kStepShared,
            StepArgsOf<T>{shape, tables, gradients, step.numbers, plan, stops, slices, applied});
  return {};
}

#define JAX_TT_INSTANTIATE(T)                                                                                        \
  template Status SumSharesAndStep(TableQueue&, const TTShape&, const CudaPlan&, const PlanRef&, const CoreShares&,  \
                                   const CoreTables<T>&, const TTStep&, float*);                                     \
  template Status ApplyStep(TableQueue&, const TTShape&, const PlanRef&, const CoreTables<T>&, const CoreGradients&, \
                            const TTStep&, int32_t*, float*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
