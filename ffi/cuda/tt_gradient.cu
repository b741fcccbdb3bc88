#include <algorithm>

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/rule_launches.h"
#include "ffi/cuda/tt_step.h"

namespace jax_tt {
namespace {

constexpr int64_t kMaxBlocks = 8448;  // fills the largest GPU several times

// One block per part.  A slice narrower than the block is summed by several groups of threads, each over every
// so-many-th row, whose sums are then added in order.
template <typename Tables>
__global__ void __launch_bounds__(kSliceThreads) SumPartRows(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const SumArgs& args = tables.Find(&block);
  SharedArena arena;
  const Shared<int32_t> batch = arena.Take<int32_t>(kSliceThreads);
  const Shared<float> sums = arena.Take<float>(kSliceThreads);
  const CudaPlan& layout = args.layout;
  const int32_t* plan = args.plan.get();
  const PartOf at(layout, args.asked, block.index);
  if (at.part >= plan[CudaPlan::kParts + at.core]) return;
  const int64_t slice = plan[layout.part_slice(at.core) + at.part];
  const int32_t* segment = plan + layout.segment(at.core) + slice;
  const int64_t begin = segment[0] + (at.part - plan[layout.first_part(at.core) + slice]) * layout.part_rows[at.core];
  const int64_t end = min(static_cast<int64_t>(segment[1]), begin + layout.part_rows[at.core]);
  const int64_t width = args.shape.slice_size(at.core);
  const float* shares = args.shares.row[at.core];
  const int groups = width < kSliceThreads ? static_cast<int>(kSliceThreads / width) : 1;
  const int group = groups == 1 ? 0 : static_cast<int>(threadIdx.x / width);
  for (int64_t base = 0; base < width; base += kSliceThreads) {
    const int64_t element = groups == 1 ? base + threadIdx.x : threadIdx.x % width;
    const bool works = group < groups && element < width;
    float sum = 0;
    for (int64_t first = begin; first < end; first += kSliceThreads) {
      const int64_t entry = first + threadIdx.x;
      // Positions other than the first of their row have no share of their own.
      const int64_t row = entry < end ? plan[layout.row_head() + plan[layout.list(at.core) + entry]] : -1;
      batch[threadIdx.x] = static_cast<int32_t>(args.chunk.holds(row) ? row - args.chunk.begin : -1);
      __syncthreads();
      const int count = static_cast<int>(min(end - first, static_cast<int64_t>(kSliceThreads)));
      if (works)
        for (int i = group; i < count; i += groups) {
          const int64_t share = batch[i];
          if (share >= 0) sum += shares[share * width + element];
        }
      __syncthreads();
    }
    if (groups > 1) {
      sums[threadIdx.x] = sum;
      __syncthreads();
      if (group == 0 && works)
        for (int g = 1; g < groups; ++g) sum += sums[g * width + element];
    }
    if (works && group == 0) args.shares.part[at.core][at.part * width + element] = sum;
  }
}

template <typename Tables>
__global__ void __launch_bounds__(kSliceThreads) SumSlices(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const SumArgs& args = tables.Find(&block);
  const SliceSum sum(args, block.index);
  if (!sum.exists()) return;
  float* gradient = args.gradients.core[sum.core()] + sum.slice() * sum.width();
  const bool first_chunk = args.chunk.begin == 0;
  if (threadIdx.x == 0) {
    int64_t flag = sum.slice();
    for (int k = 0; k < sum.core(); ++k) flag += args.shape.p[k];
    args.gradients.touched[flag] = 1;
  }
  for (int64_t e = threadIdx.x; e < sum.width(); e += kSliceThreads)
    gradient[e] = first_chunk ? sum.Sum(e) : gradient[e] + sum.Sum(e);
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

constexpr TableKernel kSumPartRows =
    TableKernelOf<SumArgs, SumPartRows<OneTable<SumArgs>>, SumPartRows<ManyTables<SumArgs>>, kSliceThreads>::kKernel;
constexpr TableKernel kSumSlices =
    TableKernelOf<SumArgs, SumSlices<OneTable<SumArgs>>, SumSlices<ManyTables<SumArgs>>, kSliceThreads>::kKernel;
constexpr TableKernel kFindNonFinite = TableKernelOf<FiniteArgs, FindNonFinite<OneTable<FiniteArgs>>,
                                                     FindNonFinite<ManyTables<FiniteArgs>>, kSliceThreads>::kKernel;

// The launches of a rule; an error where it has none.
template <typename T>
Status FindLaunches(int kind, SliceLaunches* launches) {
#define JAX_TT_LAUNCHES(Rule) SliceLaunchesOf<T, Rule>(),
  static constexpr SliceLaunches kOwn[] = {JAX_TT_OPTIMIZERS(JAX_TT_LAUNCHES)};
#undef JAX_TT_LAUNCHES
  if (kind < kNumOptimizers) {
    *launches = kOwn[kind];
    return {};
  }
  const RuleLaunches* of_rule = nullptr;
  JAX_TT_RETURN_IF_ERROR(FindExported(kind, &of_rule));
  *launches = of_rule->slices<T>();
  return {};
}

}  // namespace

void SumRows(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
             const RowChunk& chunk, const CoreShares& shares) {
  SumArgs args{shape, layout, plan, chunk, shares, {}, {}};
  for (int k = 0; k < shape.d; ++k) args.asked[k] = shares.row[k] != nullptr;
  queue.Add(kSumPartRows, args.blocks(), SharedBytes<int32_t>(kSliceThreads) + SharedBytes<float>(kSliceThreads), args);
}

void SumParts(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
              const RowChunk& chunk, const CoreShares& shares, const CoreGradients& gradients) {
  SumArgs args{shape, layout, plan, chunk, shares, gradients, {}};
  std::fill_n(args.asked, shape.d, true);
  queue.Add(kSumSlices, args.blocks(), 0, args);
}

template <typename T>
Status SumPartsAndStep(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
                       const CoreShares& shares, const CoreTables<T>& tables, const TTStep& step, float* applied) {
  SumArgs args{shape, layout, plan, {}, shares, {}, {}};
  std::fill_n(args.asked, shape.d, true);
  SliceLaunches launches;
  JAX_TT_RETURN_IF_ERROR(FindLaunches<T>(step.kind, &launches));
  queue.Add(launches.sum_and_step, std::max<int64_t>(args.blocks(), 1), kStepShared,
            SumAndStepArgs<T>{args, tables, step.numbers, {plan, nullptr}, applied});
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
  const StopSigns signs{plan, step.skip_nonfinite ? stop : nullptr};
  SliceLaunches launches;
  JAX_TT_RETURN_IF_ERROR(FindLaunches<T>(step.kind, &launches));
  queue.Add(launches.step, blocks, kStepShared,
            StepArgsOf<T>{shape, tables, gradients, step.numbers, signs, slices, applied});
  return {};
}

#define JAX_TT_INSTANTIATE(T)                                                                                        \
  template Status SumPartsAndStep(TableQueue&, const TTShape&, const CudaPlan&, const PlanRef&, const CoreShares&,   \
                                  const CoreTables<T>&, const TTStep&, float*);                                      \
  template Status ApplyStep(TableQueue&, const TTShape&, const PlanRef&, const CoreTables<T>&, const CoreGradients&, \
                            const TTStep&, int32_t*, float*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
