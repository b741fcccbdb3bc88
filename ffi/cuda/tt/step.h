// The optimizer steps of slices: one block sums the parts of a slice, and steps it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ffi/cuda/tables/kernel.h"
#include "ffi/cuda/tt/gradient.h"

namespace jax_tt {

constexpr int kSliceThreads = 256;

// What the kernels need of the shape and of the plan, worked out once: most blocks have little to do beside.
struct SumArgs {
  PlanRef plan;
  RowChunk chunk;
  CoreShares shares;
  CoreGradients gradients;
  int64_t parts = 0, row_head = 0;  // places in the plan
  // By core.  The parts of all cores follow each other, and every block has one.
  int32_t begin[kMaxCores] = {}, end[kMaxCores] = {};  // of its blocks
  int64_t list[kMaxCores] = {};                        // its place in the plan
  int64_t width[kMaxCores] = {};                       // of a slice
  int64_t slices[kMaxCores] = {};                      // of the cores before it

  SumArgs() = default;
  SumArgs(const TTShape& shape, const CudaPlan& layout, const PlanRef& plan, const RowChunk& chunk,
          const CoreShares& shares, const CoreGradients& gradients)
      : plan(plan),
        chunk(chunk),
        shares(shares),
        gradients(gradients),
        parts(layout.parts(0)),
        row_head(layout.row_head()) {
    int64_t blocks = 0, before = 0;
    for (int k = 0; k < kMaxCores; ++k) {
      begin[k] = static_cast<int32_t>(blocks);
      if (k < shape.d) {
        blocks += layout.max_parts[k];
        list[k] = layout.list(k);
        width[k] = shape.slice_size(k);
        slices[k] = before;
        before += shape.p[k];
      }
      end[k] = static_cast<int32_t>(blocks);
    }
  }
  int64_t blocks() const { return end[kMaxCores - 1]; }
};

// The part of a block.
struct PartOf {
  int core = 0;
  PlanPart part = kNoPart;
  __device__ __forceinline__ PartOf(const SumArgs& args, const int32_t* plan, int block) {
#pragma unroll
    for (int k = 0; k < kMaxCores; ++k) core += block >= args.end[k];
    if (core < kMaxCores) part = PartsAt(plan, args.parts)[block];
  }
};

// Elements of a slice that a thread has at once, kSliceThreads apart: so many loads are under way together.
struct ElementBatch {
  static constexpr int kCount = 4;
  int64_t first;
  int left;  // behind `first`, of all threads

  __device__ __forceinline__ bool has(int k) const { return static_cast<int>(threadIdx.x) + k * kSliceThreads < left; }
  __device__ __forceinline__ int64_t at(int k) const { return first + threadIdx.x + k * kSliceThreads; }
};

// Calls fn(batch) for batch `index` of a slice and every `count`-th one behind it.
template <typename Fn>
__device__ __forceinline__ void ForBatches(int64_t width, int64_t index, int64_t count, Fn fn) {
  constexpr int64_t kBatch = ElementBatch::kCount * kSliceThreads;
  for (int64_t first = index * kBatch; first < width; first += count * kBatch)
    if (first + threadIdx.x < width) fn(ElementBatch{first, static_cast<int>(min(width - first, kBatch))});
}

// The sum of a slice's shares: a block sums those of the rows of its part, where rows have any; the last block of a
// slice to do so has the slice.  Where there are shares of parts alone, the first part's block has the slice, or, if
// blocks may divide it, that of every part some of its elements.
class SliceSum {
 public:
  // For all threads of a block; `sums` and `words` hold kSliceThreads and one more.
  __device__ __forceinline__ SliceSum(const SumArgs& args, const int32_t* plan, int block, const PartOf& own,
                                      bool divides, Shared<float> sums, Shared<int32_t> words)
      : core_(own.core), slice_(own.part.slice) {
    if (own.part.slice < 0) return;
    const int32_t before = max(-own.part.count, 0);
    const int32_t count = before == 0 ? own.part.count : PartsAt(plan, args.parts)[block - before].count;
    width_ = args.width[core_];
    shares_ = args.shares.part[core_] + (block - args.begin[core_] - before) * width_;
    const float* of_rows = args.shares.row[core_];
    if (of_rows == nullptr) {
      parts_ = divides || before == 0 ? count : 0;
      if (divides) first_batch_ = before, batch_step_ = count;
      return;
    }
    SumRows(plan + args.list[core_], plan + args.row_head, args.chunk, own.part, of_rows, shares_ + before * width_,
            sums, words);
    if (count > 1 && !IsLast(args.shares.arrived + (block - before), count, words + kSliceThreads)) return;
    parts_ = count;
  }
  __device__ __forceinline__ bool exists() const { return parts_ > 0; }
  __device__ __forceinline__ bool is_first() const { return first_batch_ == 0; }
  __device__ __forceinline__ int core() const { return core_; }
  __device__ __forceinline__ int64_t slice() const { return slice_; }
  __device__ __forceinline__ int64_t width() const { return width_; }

  // fn(batch) for the elements that the block has.
  template <typename Fn>
  __device__ __forceinline__ void ForEach(Fn fn) const {
    ForBatches(width_, first_batch_, batch_step_, fn);
  }

  // The sums of a batch.
  __device__ __forceinline__ void Read(const ElementBatch& batch, float (&sum)[ElementBatch::kCount]) const {
    constexpr int kAhead = 4;  // parts
    const float* from = shares_ + batch.at(0);
    for (float& value : sum) value = 0;
    for (int32_t part = 0; part < parts_; part += kAhead, from += kAhead * width_) {
      float values[kAhead][ElementBatch::kCount] = {};
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
#pragma unroll
        for (int k = 0; k < ElementBatch::kCount; ++k)
          if (part + j < parts_ && batch.has(k)) values[j][k] = from[j * width_ + k * kSliceThreads];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        for (int k = 0; k < ElementBatch::kCount; ++k) sum[k] += values[j][k];
    }
  }

  // Writes the sums where the first share stood, for the same threads to read them once more.
  __device__ __forceinline__ void Keep(const ElementBatch& batch, const float (&sum)[ElementBatch::kCount]) const {
    for (int k = 0; k < ElementBatch::kCount; ++k)
      if (batch.has(k)) shares_[batch.at(k)] = sum[k];
  }
  __device__ __forceinline__ void HasKept() { parts_ = 1; }

 private:
  // The share of a part from those of its rows.  A slice narrower than the block is summed by several groups of
  // threads, each over every so-many-th row, whose sums are then added in order.
  __device__ __forceinline__ void SumRows(const int32_t* list, const int32_t* row_head, const RowChunk& chunk,
                                          const PlanPart& own, const float* shares, float* to, Shared<float> sums,
                                          Shared<int32_t> rows) const {
    constexpr int kAhead = 12;  // rows that a thread asks for at once
    const int32_t begin = static_cast<int32_t>(chunk.begin), end = static_cast<int32_t>(chunk.end);
    const uint32_t width = static_cast<uint32_t>(width_), each = min(width, static_cast<uint32_t>(kSliceThreads));
    const int thread = static_cast<int>(threadIdx.x);
    const int groups = static_cast<int>(kSliceThreads / each), group = static_cast<int>(threadIdx.x / each);
    for (uint32_t element = threadIdx.x % each; element - threadIdx.x % each < width; element += kSliceThreads) {
      const bool works = group < groups && element < width;
      const float* from = shares + element;
      float sum = 0;
      for (int32_t first = own.begin; first < own.end; first += kSliceThreads) {
        const int32_t entry = first + thread;
        // Positions other than the first of their row have no share of their own.
        const int32_t row = entry < own.end ? row_head[list[entry]] : -1;
        rows[thread] = row >= begin && row < end ? row - begin : -1;
        __syncthreads();
        const int count = min(own.end - first, kSliceThreads);
        if (works) {
          for (int i = group; i < count; i += kAhead * groups) {
            float values[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
              const int at = i + k * groups;
              const int32_t share = at < count ? rows[at] : -1;
              values[k] = share >= 0 ? from[static_cast<uint64_t>(static_cast<uint32_t>(share)) * width] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < kAhead; ++k) sum += values[k];
          }
        }
        __syncthreads();
      }
      if (groups > 1) {
        sums[thread] = sum;
        __syncthreads();
        if (group == 0 && works)
          for (int g = 1; g < groups; ++g) sum += sums[g * each + thread];
        __syncthreads();
      }
      if (works && group == 0) to[element] = sum;
    }
  }

  // Whether this block is the last of `count` that come here with the same counter.  What the others wrote before they
  // came is visible then.
  static __device__ bool IsLast(int32_t* counter, int32_t count, Shared<int32_t> word) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      word[0] = atomicAdd(counter, 1) == count - 1;
      __threadfence();
    }
    __syncthreads();
    return word[0] != 0;
  }

  const int core_;
  const int64_t slice_;
  int64_t width_ = 0;
  float* shares_ = nullptr;  // of the first part
  int32_t parts_ = 0;
  int64_t first_batch_ = 0, batch_step_ = 1;
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

// Begins the step of a row: its sums, for the rules that have any, and its RowStep.  gradients(batch, values) sets the
// scaled gradients of a batch of elements.
template <typename T, template <typename> class Rule_, typename Gradients>
__device__ __forceinline__ void StartRow(RowStep<T, Rule_>& step, int64_t width, Gradients gradients) {
  using Rule = Rule_<float>;
  if constexpr (kStepsRows<Rule>) {
    SharedArena arena;
    const Shared<float> words = arena.Take<float>(kSliceThreads);
    float sums[kSumsOrOne<Rule>] = {};
    if constexpr (Rule::kSums > 0) {
      ForBatches(width, 0, 1, [&](const ElementBatch& batch) {
        typename RowStep<T, Rule_>::Element loaded[ElementBatch::kCount] = {};
        float values[ElementBatch::kCount];
#pragma unroll
        for (int k = 0; k < ElementBatch::kCount; ++k)
          if (batch.has(k)) loaded[k] = step.Load(batch.at(k));
        gradients(batch, values);
#pragma unroll
        for (int k = 0; k < ElementBatch::kCount; ++k)
          if (batch.has(k)) step.Add(loaded[k], values[k], sums);
      });
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

// Updates a batch of elements.
template <typename Step, typename Gradients>
__device__ __forceinline__ void UpdateBatch(const Step& step, const ElementBatch& batch, Gradients gradients) {
  typename Step::Element loaded[ElementBatch::kCount] = {};
  float values[ElementBatch::kCount];
#pragma unroll
  for (int k = 0; k < ElementBatch::kCount; ++k)
    if (batch.has(k)) loaded[k] = step.Load(batch.at(k));
  gradients(batch, values);
#pragma unroll
  for (int k = 0; k < ElementBatch::kCount; ++k)
    if (batch.has(k)) step.Update(batch.at(k), loaded[k], values[k]);
}

// Whether a batch must not change the table: its output was NaN, and its gradient says nothing.
__device__ __forceinline__ bool IsRefused(const int32_t* plan) {
  return (plan[CudaPlan::kBroken] | plan[CudaPlan::kBadIds]) != 0;
}

// What the kernels of a step are given: shares of parts that are summed first, or gradients.
template <typename T>
struct SumAndStepArgs {
  SumArgs sums;
  CoreTables<T> tables;
  StepNumbers numbers;
  float* applied;
};

template <typename T>
struct StepArgsOf {
  TTShape shape;
  CoreTables<T> tables;
  CoreGradients gradients;
  StepNumbers numbers;
  PlanRef plan;         // or none: `given` is null
  const int32_t* stop;  // or null: whether the step must not be taken, whatever the plan says
  int64_t slices;
  float* applied;
};

template <typename T, template <typename> class Rule>
__global__ void __launch_bounds__(kSliceThreads, Rule<float>::kElementSlots == 0 ? 4 : 3)
    SumAndStepSlices(const __grid_constant__ TableList<SumAndStepArgs<T>> tables) {
  BlockOfTable block;
  const SumAndStepArgs<T>& own = tables.FindInPlace(&block);
  const SumArgs& args = own.sums;
  const int index = static_cast<int>(block.index);
  // All that has to be known of the batch is asked for before any of it is looked at.
  const int32_t* plan = args.plan.get();
  const PartOf part(args, plan, index);
  const bool stop = IsRefused(plan), allowed = own.numbers.allowed();
  if (index == 0 && threadIdx.x == 0) *own.applied = stop ? 0.0f : 1.0f;
  if (stop || !allowed) return;
  SharedArena arena;
  const Shared<float> sums = arena.Take<float>(kSliceThreads);
  SliceSum sum(args, plan, index, part, /*divides=*/!kStepsRows<Rule<float>>, sums,
               arena.Take<int32_t>(kSliceThreads + 1));
  if (!sum.exists()) return;
  const float scale = *own.numbers.scale;
  RowStep<T, Rule> step(own.tables.core[sum.core()], own.numbers, sum.slice());
  const auto gradients = [&](const ElementBatch& batch, float (&values)[ElementBatch::kCount]) {
    sum.Read(batch, values);
    for (float& value : values) value *= scale;
  };
  // The sums are needed twice if the rule has sums of its own.
  StartRow(step, sum.width(), [&](const ElementBatch& batch, float (&values)[ElementBatch::kCount]) {
    sum.Read(batch, values);
    sum.Keep(batch, values);
    for (float& value : values) value *= scale;
  });
  if constexpr (Rule<float>::kSums > 0) sum.HasKept();
  sum.ForEach([&](const ElementBatch& batch) { UpdateBatch(step, batch, gradients); });
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
  const bool refused = own.plan.given != nullptr && IsRefused(own.plan.get());
  const bool stop = refused || (own.stop != nullptr && *own.stop != 0);
  if (block.index == 0 && threadIdx.x == 0) *own.applied = stop ? 0.0f : 1.0f;
  if (stop || !own.numbers.allowed()) return;
  const float scale = *own.numbers.scale;
  for (int64_t index = block.index; index < own.slices; index += block.count) {
    if (!own.gradients.touched[index]) continue;
    const SliceOf at(own.shape, index);
    const int64_t width = own.shape.slice_size(at.core);
    const float* gradient = own.gradients.core[at.core] + at.slice * width;
    RowStep<T, Rule> step(own.tables.core[at.core], own.numbers, at.slice);
    const auto gradients = [&](const ElementBatch& batch, float (&values)[ElementBatch::kCount]) {
#pragma unroll
      for (int k = 0; k < ElementBatch::kCount; ++k) values[k] = batch.has(k) ? scale * gradient[batch.at(k)] : 0.0f;
    };
    StartRow(step, width, gradients);
    ForBatches(width, 0, 1, [&](const ElementBatch& batch) { UpdateBatch(step, batch, gradients); });
  }
}

constexpr size_t kStepShared = SharedBytes<float>(kSliceThreads);
constexpr size_t kSumShared = kStepShared + SharedBytes<int32_t>(kSliceThreads + 1);

// The launches of these kernels for one rule and storage type; they take kSumShared and kStepShared.
struct SliceLaunches {
  TableKernel sum_and_step, step;
};

template <typename T, template <typename> class Rule>
inline constexpr SliceLaunches kSliceLaunches = {
    ListKernelOf<SumAndStepArgs<T>, SumAndStepSlices<T, Rule>, kSliceThreads>::kKernel,
    ListKernelOf<StepArgsOf<T>, StepSlices<T, Rule>, kSliceThreads>::kKernel};

}  // namespace jax_tt
