#include "ffi/cuda/tt/tt.h"

#include <algorithm>

#include "ffi/cuda/tt/bags.h"
#include "ffi/cuda/tt/fast.h"
#include "ffi/cuda/tt/pass.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {
namespace {

// What the buffers of one chunk of rows may take.
constexpr int64_t kChunkFloats = (int64_t{96} << 20) / 4;

// Rows of one chunk: all of the batch where they fit.
int64_t ChunkRows(int64_t n, int64_t floats_per_row) {
  return std::min(std::max<int64_t>(n, 1), std::max<int64_t>(kChunkFloats / floats_per_row, 1024));
}

struct ForwardBuffers {
  int32_t* plan;  // where only the forward pass needs it
  void* making_plan;
  int64_t chunk_rows;
  float *rows, *pass;

  ForwardBuffers(const TTShape& shape, const CudaPlan& layout, bool own_plan, Workspace& workspace)
      : plan(workspace.Take<int32_t>(own_plan ? layout.size() : 0)),
        making_plan(workspace.Take<char>(PlanWorkspace(shape, layout))),
        chunk_rows(ChunkRows(layout.n, shape.dim())) {
    rows = workspace.Take(chunk_rows * shape.dim());
    pass = workspace.Take(PlanForward(shape, layout).workspace_floats());
  }
};

bool LeftShares(const Pivot& pivot) { return pivot.core == 1; }
bool RightShares(const TTShape& shape, const Pivot& pivot) { return pivot.core == shape.d - 2; }

struct BackwardBuffers {
  int64_t chunk_rows, num_parts = 0;
  float *rows, *row_gradients, *pass;
  CoreShares shares;

  BackwardBuffers(const TTShape& shape, const CudaPlan& layout, bool weights, Workspace& workspace) {
    const int last = shape.d - 1;
    const PivotList pivots = BackwardPivots(shape);
    const bool left = pivots.core[0] == 1;
    chunk_rows = ChunkRows(layout.n, 2 * shape.dim() + (left ? shape.slice_size(0) : 0) + shape.slice_size(last));
    rows = workspace.Take(weights ? chunk_rows * shape.dim() : 0);  // for the gradients of the weights
    row_gradients = workspace.Take(chunk_rows * shape.dim());
    if (left) shares.row[0] = workspace.Take(chunk_rows * shape.slice_size(0));
    shares.row[last] = workspace.Take(chunk_rows * shape.slice_size(last));
    for (int k = 0; k < shape.d; ++k) {
      shares.part[k] = workspace.Take(layout.max_parts[k] * shape.slice_size(k));
      num_parts += layout.max_parts[k];
    }
    shares.arrived = workspace.Take<int32_t>(num_parts);
    int64_t floats = weights ? PlanForward(shape, layout).workspace_floats() : 0;
    for (int i = 0; i < pivots.count; ++i)
      floats = std::max(floats, PlanBackward(shape, layout, pivots.core[i]).workspace_floats());
    pass = workspace.Take(floats);
  }
};

int64_t NumSlices(const TTShape& shape) {
  int64_t slices = 0;
  for (int k = 0; k < shape.d; ++k) slices += shape.p[k];
  return slices;
}

// Whether each slice takes its step as soon as its gradient is summed: when all of it comes at once.
bool StepsAtOnce(int64_t n, int64_t chunk_rows, bool skip_nonfinite) { return n <= chunk_rows && !skip_nonfinite; }

// What an update takes beside BackwardBuffers where slices do not step at once.
struct UpdateBuffers {
  CoreGradients gradients;
  int32_t* stop = nullptr;

  UpdateBuffers(const TTShape& shape, Workspace& workspace) {
    for (int k = 0; k < shape.d; ++k) gradients.core[k] = workspace.Take(shape.core_size(k));
    gradients.touched = workspace.Take<int32_t>(NumSlices(shape));
    stop = workspace.Take<int32_t>(1);
  }
};

// fn(chunk) over the chunks of a batch; at least one, to clear what nothing is added to.
template <typename Fn>
Status ForEachChunk(int64_t n, int64_t chunk_rows, Fn fn) {
  for (int64_t begin = 0; begin < std::max<int64_t>(n, 1); begin += chunk_rows)
    JAX_TT_RETURN_IF_ERROR(fn(RowChunk{begin, begin + chunk_rows}));
  return {};
}

// The shares of all cores, chunk by chunk; then consume(chunk, shares).
template <typename T, typename Consume>
Status ForEachShare(TableQueue& queue, const TTArgs<T>& args, const BackwardBuffers& buffers, const float* out_gradient,
                    float* weight_gradient, Consume consume) {
  const TTShape& shape = args.shape;
  const PivotList pivots = BackwardPivots(shape);
  bool fast = false;  // then there is one pivot
  JAX_TT_RETURN_IF_ERROR(HasFastPass(shape, MakePivot(shape, args.layout.main), &fast));
  return ForEachChunk(args.layout.n, buffers.chunk_rows, [&](const RowChunk& chunk) -> Status {
    if (weight_gradient != nullptr) {
      JAX_TT_RETURN_IF_ERROR(RowsPass(queue, args, chunk, buffers.rows, buffers.pass));
      WeightGradients(queue, args, chunk, buffers.rows, out_gradient, weight_gradient);
    }
    const Cleared cleared{buffers.shares.arrived, buffers.num_parts};
    if (!fast) GatherRowGradients(queue, args, chunk, out_gradient, buffers.row_gradients, cleared);
    for (int i = 0; i < pivots.count; ++i) {
      const Pivot pivot = MakePivot(shape, pivots.core[i]);
      const GradientShares shares{buffers.shares.part[pivot.core], LeftShares(pivot) ? buffers.shares.row[0] : nullptr,
                                  RightShares(shape, pivot) ? buffers.shares.row[shape.d - 1] : nullptr};
      JAX_TT_RETURN_IF_ERROR(
          fast ? FastGradientPass(queue, args, chunk, out_gradient, shares, cleared)
               : GradientPass(queue, args, pivot.core, chunk, buffers.row_gradients, shares, buffers.pass));
    }
    return consume(chunk, buffers.shares);
  });
}

// Sees to it that the plan in args is this batch's, where lookups are given.
template <typename T>
void CheckPlan(TableQueue& queue, const Lookups* lookups, Workspace& workspace, TTArgs<T>* args) {
  if (lookups == nullptr) return;
  void* memory = workspace.Take<char>(EnsurePlanWorkspace(args->shape, args->layout));
  args->plan = EnsurePlan(queue, args->shape, args->layout, *lookups, args->plan.given, memory);
}

}  // namespace

CudaPlan MakeCudaPlan(const TTShape& shape, int64_t n) {
  return LayOutPlan(shape, n, FastTileOf(shape, MakePivot(shape, MainPivot(shape)), n));
}

int64_t TTForwardWorkspace(const TTShape& shape, int64_t n, bool own_plan) {
  Workspace workspace(nullptr);
  ForwardBuffers(shape, MakeCudaPlan(shape, n), own_plan, workspace);
  return workspace.bytes();
}

int64_t TTBackwardWorkspace(const TTShape& shape, int64_t n, const TTAsked& asked) {
  Workspace workspace(nullptr);
  const CudaPlan layout = MakeCudaPlan(shape, n);
  BackwardBuffers(shape, layout, asked.weights, workspace);
  if (asked.check_plan) workspace.Take<char>(EnsurePlanWorkspace(shape, layout));
  return workspace.bytes();
}

int64_t TTUpdateWorkspace(const TTShape& shape, int64_t n, const TTAsked& asked) {
  Workspace workspace(nullptr), backward(nullptr);
  const int64_t chunk_rows = BackwardBuffers(shape, MakeCudaPlan(shape, n), asked.weights, backward).chunk_rows;
  if (!StepsAtOnce(n, chunk_rows, asked.skip_nonfinite)) UpdateBuffers(shape, workspace);
  return workspace.bytes() + TTBackwardWorkspace(shape, n, asked);
}

int64_t TTApplyWorkspace() { return 256; }

template <typename T>
Status TTForward(TableQueue& queue, TTArgs<T> args, const Lookups& lookups, const float* sentinel, bool hash,
                 int32_t* plan, float* out, void* memory) {
  Workspace workspace(memory);
  const ForwardBuffers buffers(args.shape, args.layout, plan == nullptr, workspace);
  if (plan == nullptr) plan = buffers.plan;
  args.plan.given = plan;
  BuildPlan(queue, args.shape, args.layout, lookups, sentinel, hash, plan, buffers.making_plan);
  return ForEachChunk(args.layout.n, buffers.chunk_rows, [&](const RowChunk& chunk) -> Status {
    JAX_TT_RETURN_IF_ERROR(RowsPass(queue, args, chunk, buffers.rows, buffers.pass));
    PoolRows(queue, args, chunk, buffers.rows, out);
    return {};
  });
}

template <typename T>
Status TTBackward(TableQueue& queue, TTArgs<T> args, const Lookups* lookups, const float* out_gradient,
                  const CoreGradients& gradients, float* weight_gradient, void* memory) {
  const TTShape& shape = args.shape;
  Workspace workspace(memory);
  const BackwardBuffers buffers(shape, args.layout, weight_gradient != nullptr, workspace);
  CheckPlan(queue, lookups, workspace, &args);
  queue.Clear(gradients.touched, NumSlices(shape));
  for (int k = 0; k < shape.d; ++k) queue.Clear(gradients.core[k], shape.core_size(k));
  return ForEachShare(queue, args, buffers, out_gradient, weight_gradient,
                      [&](const RowChunk& chunk, const CoreShares& shares) -> Status {
                        SumShares(queue, shape, args.layout, args.plan, chunk, shares, gradients);
                        return {};
                      });
}

template <typename T>
Status TTUpdate(TableQueue& queue, TTArgs<T> args, const Lookups* lookups, const CoreTables<T>& tables,
                const float* out_gradient, const TTStep& step, float* weight_gradient, float* applied, void* memory) {
  const TTShape& shape = args.shape;
  Workspace workspace(memory);
  const BackwardBuffers buffers(shape, args.layout, weight_gradient != nullptr, workspace);
  CheckPlan(queue, lookups, workspace, &args);
  if (StepsAtOnce(args.layout.n, buffers.chunk_rows, step.skip_nonfinite))
    return ForEachShare(queue, args, buffers, out_gradient, weight_gradient,
                        [&](const RowChunk&, const CoreShares& shares) {
                          return SumSharesAndStep(queue, shape, args.layout, args.plan, shares, tables, step, applied);
                        });
  const UpdateBuffers sums(shape, workspace);
  queue.Clear(sums.gradients.touched, NumSlices(shape));
  JAX_TT_RETURN_IF_ERROR(ForEachShare(queue, args, buffers, out_gradient, weight_gradient,
                                      [&](const RowChunk& chunk, const CoreShares& shares) -> Status {
                                        SumShares(queue, shape, args.layout, args.plan, chunk, shares, sums.gradients);
                                        return {};
                                      }));
  return ApplyStep(queue, shape, args.plan, tables, sums.gradients, step, sums.stop, applied);
}

template <typename T>
Status TTApply(TableQueue& queue, const TTShape& shape, const CoreTables<T>& tables, const CoreGradients& gradients,
               const TTStep& step, float* applied, void* workspace) {
  return ApplyStep(queue, shape, PlanRef{}, tables, gradients, step, static_cast<int32_t*>(workspace), applied);
}

#define JAX_TT_INSTANTIATE(T)                                                                                         \
  template Status TTForward(TableQueue&, TTArgs<T>, const Lookups&, const float*, bool, int32_t*, float*, void*);     \
  template Status TTBackward(TableQueue&, TTArgs<T>, const Lookups*, const float*, const CoreGradients&, float*,      \
                             void*);                                                                                  \
  template Status TTUpdate(TableQueue&, TTArgs<T>, const Lookups*, const CoreTables<T>&, const float*, const TTStep&, \
                           float*, float*, void*);                                                                    \
  template Status TTApply(TableQueue&, const TTShape&, const CoreTables<T>&, const CoreGradients&, const TTStep&,     \
                          float*, void*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
