#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/tt_gradient.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;

// Which slice of which core a block has; the slices of all cores follow each other.
struct SliceOf {
  int core = 0;
  int64_t slice;
  __device__ SliceOf(const TTShape& shape, int64_t index) : slice(index) {
    while (slice >= shape.p[core]) slice -= shape.p[core++];
  }
};

int64_t NumSlices(const TTShape& shape) {
  int64_t slices = 0;
  for (int k = 0; k < shape.d; ++k) slices += shape.p[k];
  return slices;
}

struct SumArgs {
  TTShape shape;
  CudaPlan layout;
  PlanRef plan;
  RowChunk chunk;
  CoreShares shares;
  CoreGradients gradients;
  bool clear;
};

// The shares of one slice as indices into those of its core, a batch of them at a time.
class ShareList {
 public:
  __device__ ShareList(const SumArgs& args, int core, int64_t slice, Shared<int32_t> batch)
      : args_(args), plan_(args.plan.get()), core_(core), batch_(batch), by_part_(args.layout.part_rows[core] > 0) {
    const int32_t* ends = plan_ + (by_part_ ? args.layout.first_part(core) : args.layout.segment(core)) + slice;
    begin_ = ends[0];
    end_ = ends[1];
  }
  __device__ bool empty() const { return begin_ == end_; }
  __device__ int64_t size() const { return end_ - begin_; }

  // Puts shares [first, first + kThreads) into the batch; -1 where a position has none in this chunk.
  __device__ void Load(int64_t first) {
    const int64_t i = begin_ + first + threadIdx.x;
    int64_t share = -1;
    if (i < end_ && by_part_) share = i;
    if (i < end_ && !by_part_) {
      const int64_t row = plan_[args_.layout.row_head() + plan_[args_.layout.list(core_) + i]];
      if (args_.chunk.holds(row)) share = row - args_.chunk.begin;
    }
    batch_[threadIdx.x] = static_cast<int32_t>(share);
  }

 private:
  const SumArgs& args_;
  const int32_t* plan_;
  const int core_;
  Shared<int32_t> batch_;
  const bool by_part_;
  int64_t begin_, end_;
};

// One block per slice.  A slice narrower than the block is summed by several groups of threads, each over every
// so-many-th share, whose sums are then added in order.
__global__ void __launch_bounds__(kThreads) SumSlices(const __grid_constant__ SumArgs args) {
  SharedArena arena;
  const Shared<int32_t> batch = arena.Take<int32_t>(kThreads);
  const Shared<float> partial = arena.Take<float>(kThreads);
  const SliceOf at(args.shape, blockIdx.x);
  const int64_t width = args.shape.slice_size(at.core);
  ShareList list(args, at.core, at.slice, batch);
  float* gradient = args.gradients.core[at.core] + at.slice * width;
  const bool first_chunk = args.chunk.begin == 0;
  if (first_chunk && args.gradients.touched != nullptr && threadIdx.x == 0)
    args.gradients.touched[blockIdx.x] = !list.empty();
  if (list.empty()) {
    if (args.clear && first_chunk)
      for (int64_t e = threadIdx.x; e < width; e += kThreads) gradient[e] = 0;
    return;
  }
  const int groups = width < kThreads ? static_cast<int>(kThreads / width) : 1;
  const int group = groups == 1 ? 0 : static_cast<int>(threadIdx.x / width);
  for (int64_t base = 0; base < width; base += kThreads) {
    const int64_t element = groups == 1 ? base + threadIdx.x : threadIdx.x % width;
    const bool works = group < groups && element < width;
    float sum = 0;
    for (int64_t first = 0; first < list.size(); first += kThreads) {
      list.Load(first);
      __syncthreads();
      const int count = static_cast<int>(min(list.size() - first, static_cast<int64_t>(kThreads)));
      if (works)
        for (int i = group; i < count; i += groups) {
          const int64_t share = batch[i];
          if (share >= 0) sum += args.shares.core[at.core][share * width + element];
        }
      __syncthreads();
    }
    if (groups > 1) {
      partial[threadIdx.x] = sum;
      __syncthreads();
      if (group == 0 && works)
        for (int g = 1; g < groups; ++g) sum += partial[g * width + element];
    }
    if (works && group == 0) gradient[element] = first_chunk ? sum : gradient[element] + sum;
  }
}

template <typename T>
struct StepArgs {
  TTShape shape;
  CoreTables<T> tables;
  CoreGradients gradients;
  StepNumbers step;
  const int32_t* skip;  // null: never
  float* applied;
};

__global__ void __launch_bounds__(kThreads)
    FindNonFinite(const __grid_constant__ TTShape shape, const __grid_constant__ CoreGradients gradients,
                  const float* scale, int32_t* skip) {
  if (!gradients.touched[blockIdx.x]) return;
  const SliceOf at(shape, blockIdx.x);
  const int64_t width = shape.slice_size(at.core);
  const float* gradient = gradients.core[at.core] + at.slice * width;
  // A sum of products with zero is zero unless one of them is infinite or NaN.
  float probe = 0;
  for (int64_t e = threadIdx.x; e < width; e += kThreads) probe += (*scale * gradient[e]) * 0.0f;
  if (!(probe == 0.0f)) atomicExch(skip, 1);
}

template <typename T, template <typename> class Rule>
__global__ void __launch_bounds__(kThreads) StepSlices(const __grid_constant__ StepArgs<T> args) {
  const bool skip = args.skip != nullptr && *args.skip != 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.applied = skip ? 0.0f : 1.0f;
  if (skip || !args.gradients.touched[blockIdx.x]) return;
  const SliceOf at(args.shape, blockIdx.x);
  const int64_t width = args.shape.slice_size(at.core);
  const float* gradient = args.gradients.core[at.core] + at.slice * width;
  const float scale = *args.step.scale;
  RowStep<T, Rule> step(args.tables.core[at.core], args.step, at.slice);
  if constexpr (Rule<float>::kRowWise) {
    SharedArena arena;
    const Shared<float> sums = arena.Take<float>(kThreads);
    float squares = 0;
    for (int64_t e = threadIdx.x; e < width; e += kThreads) squares += (scale * gradient[e]) * (scale * gradient[e]);
    sums[threadIdx.x] = squares;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      step.StartRow(sums[0] / static_cast<float>(width));
      sums[0] = step.row_step();
    }
    __syncthreads();
    step.set_row_step(sums[0]);
  }
  for (int64_t e = threadIdx.x; e < width; e += kThreads) step.Update(e, scale * gradient[e]);
}

}  // namespace

Status SumShares(cudaStream_t stream, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
                 const RowChunk& chunk, const CoreShares& shares, const CoreGradients& gradients, bool clear) {
  const SumArgs args{shape, layout, plan, chunk, shares, gradients, clear};
  return Launch(stream, NumSlices(shape), kThreads, SharedBytes<int32_t>(kThreads) + SharedBytes<float>(kThreads),
                SumSlices, args);
}

template <typename T>
Status ApplyStep(cudaStream_t stream, const TTShape& shape, int kind, const CoreTables<T>& tables,
                 const CoreGradients& gradients, const StepNumbers& step, bool skip_nonfinite, int32_t* skip,
                 float* applied) {
  if (skip_nonfinite) {
    if (Status status = ToStatus(cudaMemsetAsync(skip, 0, sizeof(int32_t), stream)); !status.ok()) return status;
    if (Status status =
            Launch(stream, NumSlices(shape), kThreads, 0, FindNonFinite, shape, gradients, step.scale, skip);
        !status.ok())
      return status;
  }
  const StepArgs<T> args{shape, tables, gradients, step, skip_nonfinite ? skip : nullptr, applied};
  return DispatchRule(kind, [&](auto tag) {
    return Launch(stream, NumSlices(shape), kThreads, SharedBytes<float>(kThreads),
                  StepSlices<T, decltype(tag)::template Rule>, args);
  });
}

#define JAX_TT_INSTANTIATE(T)                                                                              \
  template Status ApplyStep(cudaStream_t, const TTShape&, int, const CoreTables<T>&, const CoreGradients&, \
                            const StepNumbers&, bool, int32_t*, float*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
