#include <algorithm>

#include "ffi/cuda/block_scan.h"
#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/tt_gradient.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 8448;  // fills the largest GPU several times

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

// One block per part.  A slice narrower than the block is summed by several groups of threads, each over every
// so-many-th row, whose sums are then added in order.
__global__ void __launch_bounds__(kThreads) SumPartRows(const __grid_constant__ SumArgs args) {
  SharedArena arena;
  const Shared<int32_t> batch = arena.Take<int32_t>(kThreads);
  const Shared<float> sums = arena.Take<float>(kThreads);
  const CudaPlan& layout = args.layout;
  const int32_t* plan = args.plan.get();
  const PartOf at(layout, args.asked, blockIdx.x);
  if (at.part >= plan[CudaPlan::kParts + at.core]) return;
  const int64_t slice = plan[layout.part_slice(at.core) + at.part];
  const int32_t* segment = plan + layout.segment(at.core) + slice;
  const int64_t begin = segment[0] + (at.part - plan[layout.first_part(at.core) + slice]) * layout.part_rows[at.core];
  const int64_t end = min(static_cast<int64_t>(segment[1]), begin + layout.part_rows[at.core]);
  const int64_t width = args.shape.slice_size(at.core);
  const float* shares = args.shares.row[at.core];
  const int groups = width < kThreads ? static_cast<int>(kThreads / width) : 1;
  const int group = groups == 1 ? 0 : static_cast<int>(threadIdx.x / width);
  for (int64_t base = 0; base < width; base += kThreads) {
    const int64_t element = groups == 1 ? base + threadIdx.x : threadIdx.x % width;
    const bool works = group < groups && element < width;
    float sum = 0;
    for (int64_t first = begin; first < end; first += kThreads) {
      const int64_t entry = first + threadIdx.x;
      // Positions other than the first of their row have no share of their own.
      const int64_t row = entry < end ? plan[layout.row_head() + plan[layout.list(at.core) + entry]] : -1;
      batch[threadIdx.x] = static_cast<int32_t>(args.chunk.holds(row) ? row - args.chunk.begin : -1);
      __syncthreads();
      const int count = static_cast<int>(min(end - first, static_cast<int64_t>(kThreads)));
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

// The slice whose first part this block has, and the sum of its parts.
class SliceSum {
 public:
  __device__ explicit SliceSum(const SumArgs& args)
      : args_(args), plan_(args.plan.get()), at_(args.layout, args.asked, blockIdx.x) {
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

__global__ void __launch_bounds__(kThreads) SumSlices(const __grid_constant__ SumArgs args) {
  const SliceSum sum(args);
  if (!sum.exists()) return;
  float* gradient = args.gradients.core[sum.core()] + sum.slice() * sum.width();
  const bool first_chunk = args.chunk.begin == 0;
  if (threadIdx.x == 0) {
    int64_t flag = sum.slice();
    for (int k = 0; k < sum.core(); ++k) flag += args.shape.p[k];
    args.gradients.touched[flag] = 1;
  }
  for (int64_t e = threadIdx.x; e < sum.width(); e += kThreads)
    gradient[e] = first_chunk ? sum.Sum(e) : gradient[e] + sum.Sum(e);
}

// Sum over the block, in a fixed order; every thread gets it.  `sums` holds kThreads words.
__device__ float BlockSum(float value, Shared<float> sums) {
  sums[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
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
    const Shared<float> words = arena.Take<float>(kThreads);
    float sums[kSumsOrOne<Rule>] = {};
    if constexpr (Rule::kSums > 0) {
      for (int64_t e = threadIdx.x; e < width; e += kThreads) step.Add(e, gradient(e), sums);
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

template <typename T, template <typename> class Rule>
__global__ void __launch_bounds__(kThreads)
    SumAndStepSlices(const __grid_constant__ SumArgs args, const __grid_constant__ CoreTables<T> tables,
                     const __grid_constant__ StepNumbers numbers, const __grid_constant__ StopSigns signs,
                     float* applied) {
  const bool stop = signs.any();
  if (blockIdx.x == 0 && threadIdx.x == 0) *applied = stop ? 0.0f : 1.0f;
  if (stop || !numbers.allowed() || static_cast<int64_t>(blockIdx.x) >= args.blocks()) return;
  const SliceSum sum(args);
  if (!sum.exists()) return;
  const float scale = *numbers.scale;
  RowStep<T, Rule> step(tables.core[sum.core()], numbers, sum.slice());
  if constexpr (Rule<float>::kSums > 0) {
    // The gradients are needed twice: each thread keeps its own where the first share stood.
    StartRow(step, sum.width(), [&](int64_t e) { return scale * (*sum.share(e) = sum.Sum(e)); });
    for (int64_t e = threadIdx.x; e < sum.width(); e += kThreads) step.Update(e, scale * *sum.share(e));
  } else {
    StartRow(step, sum.width(), [](int64_t) { return 0.0f; });
    for (int64_t e = threadIdx.x; e < sum.width(); e += kThreads) step.Update(e, scale * sum.Sum(e));
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

int64_t NumSlices(const TTShape& shape) {
  int64_t slices = 0;
  for (int k = 0; k < shape.d; ++k) slices += shape.p[k];
  return slices;
}

__global__ void __launch_bounds__(kThreads)
    FindNonFinite(const __grid_constant__ TTShape shape, const __grid_constant__ CoreGradients gradients,
                  int64_t slices, const float* scale, int32_t* stop) {
  for (int64_t index = blockIdx.x; index < slices; index += gridDim.x) {
    if (!gradients.touched[index]) continue;
    const SliceOf at(shape, index);
    const int64_t width = shape.slice_size(at.core);
    const float* gradient = gradients.core[at.core] + at.slice * width;
    // A sum of products with zero is zero unless one of them is infinite or NaN.
    float probe = 0;
    for (int64_t e = threadIdx.x; e < width; e += kThreads) probe += (*scale * gradient[e]) * 0.0f;
    if (!(probe == 0.0f)) atomicExch(stop, 1);
  }
}

template <typename T, template <typename> class Rule>
__global__ void __launch_bounds__(kThreads)
    StepSlices(const __grid_constant__ TTShape shape, const __grid_constant__ CoreTables<T> tables,
               const __grid_constant__ CoreGradients gradients, const __grid_constant__ StepNumbers numbers,
               const __grid_constant__ StopSigns signs, int64_t slices, float* applied) {
  const bool stop = signs.any();
  if (blockIdx.x == 0 && threadIdx.x == 0) *applied = stop ? 0.0f : 1.0f;
  if (stop || !numbers.allowed()) return;
  const float scale = *numbers.scale;
  for (int64_t index = blockIdx.x; index < slices; index += gridDim.x) {
    if (!gradients.touched[index]) continue;
    const SliceOf at(shape, index);
    const int64_t width = shape.slice_size(at.core);
    const float* gradient = gradients.core[at.core] + at.slice * width;
    RowStep<T, Rule> step(tables.core[at.core], numbers, at.slice);
    StartRow(step, width, [&](int64_t e) { return scale * gradient[e]; });
    for (int64_t e = threadIdx.x; e < width; e += kThreads) step.Update(e, scale * gradient[e]);
  }
}

constexpr size_t kStepShared = SharedBytes<float>(kThreads);

}  // namespace

Status SumRows(cudaStream_t stream, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
               const RowChunk& chunk, const CoreShares& shares) {
  SumArgs args{shape, layout, plan, chunk, shares, {}, {}};
  for (int k = 0; k < shape.d; ++k) args.asked[k] = shares.row[k] != nullptr;
  return Launch(stream, args.blocks(), kThreads, SharedBytes<int32_t>(kThreads) + SharedBytes<float>(kThreads),
                SumPartRows, args);
}

Status SumParts(cudaStream_t stream, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
                const RowChunk& chunk, const CoreShares& shares, const CoreGradients& gradients) {
  SumArgs args{shape, layout, plan, chunk, shares, gradients, {}};
  std::fill_n(args.asked, shape.d, true);
  return Launch(stream, args.blocks(), kThreads, 0, SumSlices, args);
}

template <typename T>
Status SumPartsAndStep(cudaStream_t stream, const TTShape& shape, const CudaPlan& layout, const PlanRef& plan,
                       const CoreShares& shares, const CoreTables<T>& tables, const TTStep& step, float* applied) {
  SumArgs args{shape, layout, plan, {}, shares, {}, {}};
  std::fill_n(args.asked, shape.d, true);
  const StopSigns signs{plan, nullptr};
  return DispatchRule(step.kind, [&](auto tag) {
    return Launch(stream, std::max<int64_t>(args.blocks(), 1), kThreads, kStepShared,
                  SumAndStepSlices<T, decltype(tag)::template Rule>, args, tables, step.numbers, signs, applied);
  });
}

template <typename T>
Status ApplyStep(cudaStream_t stream, const TTShape& shape, const PlanRef& plan, const CoreTables<T>& tables,
                 const CoreGradients& gradients, const TTStep& step, int32_t* stop, float* applied) {
  const int64_t slices = NumSlices(shape), blocks = std::min(slices, kMaxBlocks);
  if (step.skip_nonfinite) {
    JAX_TT_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(stop, 0, sizeof(int32_t), stream)));
    JAX_TT_RETURN_IF_ERROR(
        Launch(stream, blocks, kThreads, 0, FindNonFinite, shape, gradients, slices, step.numbers.scale, stop));
  }
  const StopSigns signs{plan, step.skip_nonfinite ? stop : nullptr};
  return DispatchRule(step.kind, [&](auto tag) {
    return Launch(stream, blocks, kThreads, kStepShared, StepSlices<T, decltype(tag)::template Rule>, shape, tables,
                  gradients, step.numbers, signs, slices, applied);
  });
}

#define JAX_TT_INSTANTIATE(T)                                                                                         \
  template Status SumPartsAndStep(cudaStream_t, const TTShape&, const CudaPlan&, const PlanRef&, const CoreShares&,   \
                                  const CoreTables<T>&, const TTStep&, float*);                                       \
  template Status ApplyStep(cudaStream_t, const TTShape&, const PlanRef&, const CoreTables<T>&, const CoreGradients&, \
                            const TTStep&, int32_t*, float*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
