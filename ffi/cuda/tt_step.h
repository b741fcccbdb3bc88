// The optimizer steps of slices: one block sums the parts of a slice, and steps it.
#ifndef JAX_TT_CUDA_TT_STEP_H_
#define JAX_TT_CUDA_TT_STEP_H_

#include <stddef.h>
#include <stdint.h>

#include "ffi/cuda/table_kernel.h"
#include "ffi/cuda/tt_gradient.h"

namespace jax_tt {

constexpr int kSliceThreads = 256;

// Which part of which core a block has; the parts of all cores follow each other.
struct PartOf {
  int core = 0;
  int64_t part;
  __device__ PartOf(const CudaPlan& layout, int64_t index) : part(index) {
    while (part >= layout.max_parts[core]) part -= layout.max_parts[core++];
  }
};

struct SumArgs {
  TTShape shape;
  CudaPlan layout;
  PlanRef plan;
  RowChunk chunk;
  CoreShares shares;
  CoreGradients gradients;

  __host__ __device__ int64_t blocks() const {
    int64_t parts = 0;
    for (int k = 0; k < shape.d; ++k) parts += layout.max_parts[k];
    return parts;
  }
};

// The sum of a slice's shares: a block sums those of the rows of its part, where rows have any; the last block of a
// slice to do so, or that of the first part, has the slice.
class SliceSum {
 public:
  // For all threads of a block; `sums` and `words` hold kSliceThreads and one more.
  __device__ SliceSum(const SumArgs& args, int64_t block, Shared<float> sums, Shared<int32_t> words)
      : args_(args), at_(args.layout, block) {
    const int32_t* plan = args.plan.get();
    const PlanPart* parts = PartsAt(plan, args.layout.parts(at_.core));
    const PlanPart own = parts[at_.part];
    if (own.slice < 0) return;
    slice_ = own.slice;
    first_ = at_.part + min(own.count, 0);
    if (args.shares.row[at_.core] == nullptr) {
      parts_ = max(own.count, 0);
      return;
    }
    SumRows(plan, own, sums, words);
    const int32_t count = parts[first_].count;
    if (count > 1 && !IsLast(block + min(own.count, 0), count, words + kSliceThreads)) return;
    parts_ = count;
  }
  __device__ bool exists() const { return parts_ > 0; }
  __device__ int core() const { return at_.core; }
  __device__ int64_t slice() const { return slice_; }
  __device__ int64_t width() const { return args_.shape.slice_size(at_.core); }
  __device__ float* share(int64_t element) const { return args_.shares.part[at_.core] + first_ * width() + element; }
  __device__ float Sum(int64_t element) const {
    float sum = 0;
    for (int64_t part = 0; part < parts_; ++part) sum += share(element)[part * width()];
    return sum;
  }

  // fn(element, its sum) for those of this thread; several sums are read before the first is used.
  template <typename Fn>
  __device__ __forceinline__ void ForEach(Fn fn) const {
    constexpr int kAhead = 4;
    const int64_t width = this->width();
    for (int64_t base = threadIdx.x; base < width; base += kAhead * kSliceThreads) {
      float values[kAhead] = {};
      for (int64_t part = 0; part < parts_; ++part)
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const int64_t element = base + k * kSliceThreads;
          if (element < width) values[k] += share(element)[part * width];
        }
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (base + k * kSliceThreads < width) fn(base + k * kSliceThreads, values[k]);
    }
  }

 private:
  // The share of a part from those of its rows.  A slice narrower than the block is summed by several groups of
  // threads, each over every so-many-th row, whose sums are then added in order.
  __device__ void SumRows(const int32_t* plan, const PlanPart& own, Shared<float> sums, Shared<int32_t> rows) {
    const CudaPlan& layout = args_.layout;
    const int64_t width = this->width();
    const float* shares = args_.shares.row[at_.core];
    float* to = args_.shares.part[at_.core] + at_.part * width;
    const int groups = width < kSliceThreads ? static_cast<int>(kSliceThreads / width) : 1;
    const int group = groups == 1 ? 0 : static_cast<int>(threadIdx.x / width);
    for (int64_t base = 0; base < width; base += kSliceThreads) {
      const int64_t element = groups == 1 ? base + threadIdx.x : threadIdx.x % width;
      const bool works = group < groups && element < width;
      float sum = 0;
      for (int64_t first = own.begin; first < own.end; first += kSliceThreads) {
        const int64_t entry = first + threadIdx.x;
        // Positions other than the first of their row have no share of their own.
        const int64_t row = entry < own.end ? plan[layout.row_head() + plan[layout.list(at_.core) + entry]] : -1;
        rows[threadIdx.x] = static_cast<int32_t>(args_.chunk.holds(row) ? row - args_.chunk.begin : -1);
        __syncthreads();
        const int count = static_cast<int>(min(own.end - first, static_cast<int64_t>(kSliceThreads)));
        if (works) {
#pragma unroll 8
          for (int i = group; i < count; i += groups) {
            const int64_t share = rows[i];
            sum += share >= 0 ? shares[share * width + element] : 0.0f;
          }
        }
        __syncthreads();
      }
      if (groups > 1) {
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (group == 0 && works)
          for (int g = 1; g < groups; ++g) sum += sums[g * width + element];
        __syncthreads();
      }
      if (works && group == 0) to[element] = sum;
    }
  }

  // Whether this block is the last of `count` that come here with the same counter.  What the others wrote before they
  // came is visible then.
  __device__ bool IsLast(int64_t counter, int32_t count, Shared<int32_t> word) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      word[0] = atomicAdd(args_.shares.arrived + counter, 1) == count - 1;
      __threadfence();
    }
    __syncthreads();
    return word[0] != 0;
  }

  const SumArgs& args_;
  const PartOf at_;
  int64_t slice_ = 0, first_ = 0, parts_ = 0;
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
__global__ void __launch_bounds__(kSliceThreads, 3)
    SumAndStepSlices(const __grid_constant__ TableList<SumAndStepArgs<T>> tables) {
  BlockOfTable block;
  const SumAndStepArgs<T>& own = tables.FindInPlace(&block);
  const SumArgs& args = own.sums;
  const bool stop = own.signs.any();
  if (block.index == 0 && threadIdx.x == 0) *own.applied = stop ? 0.0f : 1.0f;
  if (stop || !own.numbers.allowed() || block.index >= args.blocks()) return;
  SharedArena arena;
  const Shared<float> sums = arena.Take<float>(kSliceThreads);
  const SliceSum sum(args, block.index, sums, arena.Take<int32_t>(kSliceThreads + 1));
  if (!sum.exists()) return;
  const float scale = *own.numbers.scale;
  RowStep<T, Rule> step(own.tables.core[sum.core()], own.numbers, sum.slice());
  if constexpr (Rule<float>::kSums > 0) {
    // The gradients are needed twice: each thread keeps its own where the first share stood.
    StartRow(step, sum.width(), [&](int64_t e) { return scale * (*sum.share(e) = sum.Sum(e)); });
    for (int64_t e = threadIdx.x; e < sum.width(); e += kSliceThreads) step.Update(e, scale * *sum.share(e));
  } else {
    StartRow(step, sum.width(), [](int64_t) { return 0.0f; });
    sum.ForEach([&](int64_t e, float gradient) { step.Update(e, scale * gradient); });
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
constexpr size_t kSumShared = kStepShared + SharedBytes<int32_t>(kSliceThreads + 1);

// The launches of these kernels for one rule and storage type; they take kSumShared and kStepShared.
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
