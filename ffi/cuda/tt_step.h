// The optimizer steps of slices: one block sums the parts of a slice, and steps it.
#ifndef JAX_TT_CUDA_TT_STEP_H_
#define JAX_TT_CUDA_TT_STEP_H_

#include <stddef.h>
#include <stdint.h>

#include "ffi/cuda/table_kernel.h"
#include "ffi/cuda/tt_gradient.h"

namespace jax_tt {

constexpr int kSliceThreads = 256;

// Which part of which core a block has; the parts of all cores that are asked for follow each other.
struct PartOf {
  int core = 0;
  int64_t part;
  __device__ PartOf(const CudaPlan& layout, const bool* asked, int64_t index) : part(index) {
    for (;; ++core) {
      const int64_t parts = asked[core] ? layout.max_parts[core] : 0;
      if (part < parts) return;
      part -= parts;
    }
  }
};

struct SumArgs {
  TTShape shape;
  CudaPlan layout;
  PlanRef plan;
  RowChunk chunk;
  CoreShares shares;
  CoreGradients gradients;
  bool asked[kMaxCores];

  __host__ __device__ int64_t blocks() const {
    int64_t parts = 0;
    for (int k = 0; k < shape.d; ++k) parts += asked[k] ? layout.max_parts[k] : 0;
    return parts;
  }
};

// The slice whose first part this block has, and the sum of its parts.
class SliceSum {
 public:
  __device__ SliceSum(const SumArgs& args, int64_t block)
      : args_(args), plan_(args.plan.get()), at_(args.layout, args.asked, block) {
    if (at_.part >= plan_[CudaPlan::kParts + at_.core]) return;
    slice_ = plan_[args.layout.part_slice(at_.core) + at_.part];
    const int32_t* ends = plan_ + args.layout.first_part(at_.core) + slice_;
    parts_ = ends[0] == at_.part ? ends[1] - ends[0] : 0;
  }
  __device__ bool exists() const { return parts_ > 0; }
  __device__ int core() const { return at_.core; }
  __device__ int64_t slice() const { return slice_; }
  __device__ int64_t width() const { return args_.shape.slice_size(at_.core); }
  __device__ float* share(int64_t element) const { return args_.shares.part[at_.core] + at_.part * width() + element; }
  __device__ float Sum(int64_t element) const {
    float sum = 0;
    for (int64_t part = 0; part < parts_; ++part) sum += share(element)[part * width()];
    return sum;
  }

 private:
  const SumArgs& args_;
  const int32_t* plan_;
  const PartOf at_;
  int64_t slice_ = 0, parts_ = 0;
};

// Sum over the block, in a fixed order; every thread gets it.  `sums` holds kSliceThreads words.
__device__ inline float BlockSum(float value, Shared<float> sums) {
  sums[threadIdx.x] = value;
  __syncthreads();
  for (int half = kSliceThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  const float sum = sums[0];
  __syncthreads();
  return sum;
}

// Begins the step of a row: its sums, for the rules that have any, and its RowStep.
template <typename T, template <typename> class Rule_, typename Gradient>
__device__ void StartRow(RowStep<T, Rule_>& step, int64_t width, Gradient gradient) {
  using Rule = Rule_<float>;
  if constexpr (kStepsRows<Rule>) {
    SharedArena arena;
    const Shared<float> words = arena.Take<float>(kSliceThreads);
    float sums[kSumsOrOne<Rule>] = {};
    if constexpr (Rule::kSums > 0) {
      for (int64_t e = threadIdx.x; e < width; e += kSliceThreads) step.Add(e, gradient(e), sums);
      for (float& sum : sums) sum = BlockSum(sum, words);
    }
    RowWords<Rule> row{};
    if (threadIdx.x == 0) {
      step.StartRow(sums);
      row.row = step.row();
      for (int k = 0; k < RowWords<Rule>::kCount; ++k) words[k] = row.word[k];
    }
    __syncthreads();
    for (int k = 0; k < RowWords<Rule>::kCount; ++k) row.word[k] = words[k];
    step.set_row(row.row);
    __syncthreads();
  }
}

// Whether a batch must not change the table: its output was NaN, and its gradient says nothing.
struct StopSigns {
  PlanRef plan;         // none: `given` is null
  const int32_t* stop;  // null: none

  __device__ bool any() const {
    if (stop != nullptr && *stop != 0) return true;
    if (plan.given == nullptr) return false;
    const int32_t* header = plan.get();
    return header[CudaPlan::kBroken] != 0 || header[CudaPlan::kBadIds] != 0;
  }
};

// What the kernels of a step are given: shares of parts that are summed first, or gradients.
template <typename T>
struct SumAndStepArgs {
  SumArgs sums;
  CoreTables<T> tables;
  StepNumbers numbers;
  StopSigns signs;
  float* applied;
};

template <typename T>
struct StepArgsOf {
  TTShape shape;
  CoreTables<T> tables;
  CoreGradients gradients;
  StepNumbers numbers;
  StopSigns signs;
  int64_t slices;
  float* applied;
};

template <typename T, template <typename> class Rule>
__global__ void __launch_bounds__(kSliceThreads)
    SumAndStepSlices(const __grid_constant__ TableList<SumAndStepArgs<T>> tables) {
  BlockOfTable block;
  const SumAndStepArgs<T>& own = tables.FindInPlace(&block);
  const SumArgs& args = own.sums;
  const bool stop = own.signs.any();
  if (block.index == 0 && threadIdx.x == 0) *own.applied = stop ? 0.0f : 1.0f;
  if (stop || !own.numbers.allowed() || block.index >= args.blocks()) return;
  const SliceSum sum(args, block.index);
  if (!sum.exists()) return;
  const float scale = *own.numbers.scale;
  RowStep<T, Rule> step(own.tables.core[sum.core()], own.numbers, sum.slice());
  if constexpr (Rule<float>::kSums > 0) {
    // The gradients are needed twice: each thread keeps its own where the first share stood.
    StartRow(step, sum.width(), [&](int64_t e) { return scale * (*sum.share(e) = sum.Sum(e)); });
    for (int64_t e = threadIdx.x; e < sum.width(); e += kSliceThreads) step.Update(e, scale * *sum.share(e));
  } else {
    StartRow(step, sum.width(), [](int64_t) { return 0.0f; });
    for (int64_t e = threadIdx.x; e < sum.width(); e += kSliceThreads) step.Update(e, scale * sum.Sum(e));
  }
}

// The slices of all cores follow each other.
struct SliceOf {
  int core = 0;
  int64_t slice;
  __device__ SliceOf(const TTShape& shape, int64_t index) : slice(index) {
    while (slice >= shape.p[core]) slice -= shape.p[core++];
  }
};

template <typename T, template <typename> class Rule>
__global__ void __launch_bounds__(kSliceThreads) StepSlices(const __grid_constant__ TableList<StepArgsOf<T>> tables) {
  BlockOfTable block;
  const StepArgsOf<T>& own = tables.FindInPlace(&block);
  const bool stop = own.signs.any();
  if (block.index == 0 && threadIdx.x == 0) *own.applied = stop ? 0.0f : 1.0f;
  if (stop || !own.numbers.allowed()) return;
  const float scale = *own.numbers.scale;
  for (int64_t index = block.index; index < own.slices; index += block.count) {
    if (!own.gradients.touched[index]) continue;
    const SliceOf at(own.shape, index);
    const int64_t width = own.shape.slice_size(at.core);
    const float* gradient = own.gradients.core[at.core] + at.slice * width;
    RowStep<T, Rule> step(own.tables.core[at.core], own.numbers, at.slice);
    StartRow(step, width, [&](int64_t e) { return scale * gradient[e]; });
    for (int64_t e = threadIdx.x; e < width; e += kSliceThreads) step.Update(e, scale * gradient[e]);
  }
}

constexpr size_t kStepShared = SharedBytes<float>(kSliceThreads);

// The launches of these kernels for one rule and storage type; all take kStepShared.
struct SliceLaunches {
  TableKernel sum_and_step, step;
};

template <typename T, template <typename> class Rule>
constexpr SliceLaunches SliceLaunchesOf() {
  using Sums = SumAndStepArgs<T>;
  using Steps = StepArgsOf<T>;
  return {ListKernelOf<Sums, SumAndStepSlices<T, Rule>, kSliceThreads>::kKernel,
          ListKernelOf<Steps, StepSlices<T, Rule>, kSliceThreads>::kKernel};
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_TT_STEP_H_
