#include "ffi/cuda/tt.h"

#include <algorithm>

#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/tt_bags.h"
#include "ffi/cuda/tt_pass.h"
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
  int64_t chunk_rows;
  float *rows, *pass;

  ForwardBuffers(const TTShape& shape, const CudaPlan& layout, Workspace& workspace)
      : chunk_rows(ChunkRows(layout.n, shape.dim())) {
    rows = workspace.Take(chunk_rows * shape.dim());
    pass = workspace.Take(PlanForward(shape, layout).workspace_floats());
  }
};

bool LeftShares(const Pivot& pivot) { return pivot.core == 1; }
bool RightShares(const TTShape& shape, const Pivot& pivot) { return pivot.core == shape.d - 2; }

struct BackwardBuffers {
  int64_t chunk_rows;
  float *rows, *row_gradients, *carry, *pass;
  CoreShares shares;

  BackwardBuffers(const TTShape& shape, const CudaPlan& layout, Workspace& workspace) {
    const int last = shape.d - 1;
    const PivotList pivots = BackwardPivots(shape);
    const bool left = pivots.core[0] == 1;
    chunk_rows = ChunkRows(layout.n, 2 * shape.dim() + (left ? shape.slice_size(0) : 0) + shape.slice_size(last));
    rows = workspace.Take(chunk_rows * shape.dim());  // for the gradients of the weights
    row_gradients = workspace.Take(chunk_rows * shape.dim());
    carry = workspace.Take(CarryFloats(layout.n, shape.dim()));
    if (left) shares.row[0] = workspace.Take(chunk_rows * shape.slice_size(0));
    shares.row[last] = workspace.Take(chunk_rows * shape.slice_size(last));
    for (int k = 0; k < shape.d; ++k) shares.part[k] = workspace.Take(layout.max_parts[k] * shape.slice_size(k));
    int64_t floats = PlanForward(shape, layout).workspace_floats();
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

struct UpdateBuffers {
  CoreGradients gradients;
  int32_t* stop;

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
    if (Status status = fn(RowChunk{begin, begin + chunk_rows}); !status.ok()) return status;
  return {};
}

// The shares of all cores, chunk by chunk; then consume(plan, chunk, shares).
template <typename T, typename Consume>
Status ForEachShare(cudaStream_t stream, TTArgs<T> args, const Lookups* lookups, const float* out_gradient,
                    float* weight_gradient, Workspace& workspace, Consume consume) {
  const TTShape& shape = args.shape;
  const BackwardBuffers buffers(shape, args.layout, workspace);
  if (lookups != nullptr) {
    void* memory = workspace.Take<char>(EnsurePlanWorkspace(args.layout));
    JAX_TT_RETURN_IF_ERROR(EnsurePlan(stream, shape, args.layout, *lookups, args.plan.given, memory, &args.plan));
  }
  const PivotList pivots = BackwardPivots(shape);
  return ForEachChunk(args.layout.n, buffers.chunk_rows, [&](const RowChunk& chunk) -> Status {
    if (weight_gradient != nullptr) {
      JAX_TT_RETURN_IF_ERROR(RowsPass(stream, args, chunk, buffers.rows, buffers.pass));
      JAX_TT_RETURN_IF_ERROR(WeightGradients(stream, args, chunk, buffers.rows, out_gradient, weight_gradient));
    }
    JAX_TT_RETURN_IF_ERROR(GatherRowGradients(stream, args, chunk, out_gradient, buffers.row_gradients, buffers.carry));
    for (int i = 0; i < pivots.count; ++i) {
      const Pivot pivot = MakePivot(shape, pivots.core[i]);
      const GradientShares shares{buffers.shares.part[pivot.core], LeftShares(pivot) ? buffers.shares.row[0] : nullptr,
                                  RightShares(shape, pivot) ? buffers.shares.row[shape.d - 1] : nullptr};
      JAX_TT_RETURN_IF_ERROR(
          GradientPass(stream, args, pivot.core, chunk, buffers.row_gradients, shares, buffers.pass));
    }
    JAX_TT_RETURN_IF_ERROR(SumRows(stream, shape, args.layout, args.plan, chunk, buffers.shares));
    return consume(args.plan, chunk, buffers.shares);
  });
}

}  // namespace

int64_t TTForwardWorkspace(const TTShape& shape, int64_t n) {
  Workspace workspace(nullptr);
  ForwardBuffers(shape, MakeCudaPlan(shape, n), workspace);
  return workspace.bytes();
}

int64_t TTBackwardWorkspace(const TTShape& shape, int64_t n) {
  Workspace workspace(nullptr);
  const CudaPlan layout = MakeCudaPlan(shape, n);
  BackwardBuffers(shape, layout, workspace);
  workspace.Take<char>(EnsurePlanWorkspace(layout));
  return workspace.bytes();
}

int64_t TTUpdateWorkspace(const TTShape& shape, int64_t n) {
  Workspace workspace(nullptr);
  UpdateBuffers(shape, workspace);
  return workspace.bytes() + TTBackwardWorkspace(shape, n);
}

int64_t TTApplyWorkspace() { return 256; }

template <typename T>
Status TTForward(cudaStream_t stream, const TTArgs<T>& args, float* out, void* memory) {
  Workspace workspace(memory);
  const ForwardBuffers buffers(args.shape, args.layout, workspace);
  return ForEachChunk(args.layout.n, buffers.chunk_rows, [&](const RowChunk& chunk) -> Status {
    JAX_TT_RETURN_IF_ERROR(RowsPass(stream, args, chunk, buffers.rows, buffers.pass));
    return PoolRows(stream, args, chunk, buffers.rows, out);
  });
}

template <typename T>
Status TTBackward(cudaStream_t stream, const TTArgs<T>& args, const Lookups* lookups, const float* out_gradient,
                  const CoreGradients& gradients, float* weight_gradient, void* memory) {
  const TTShape& shape = args.shape;
  Workspace workspace(memory);
  const auto clear = [stream](auto* values, int64_t count) {
    return ToStatus(cudaMemsetAsync(values, 0, static_cast<size_t>(count) * sizeof(*values), stream));
  };
  JAX_TT_RETURN_IF_ERROR(clear(gradients.touched, NumSlices(shape)));
  for (int k = 0; k < shape.d; ++k) JAX_TT_RETURN_IF_ERROR(clear(gradients.core[k], shape.core_size(k)));
  return ForEachShare(stream, args, lookups, out_gradient, weight_gradient, workspace,
                      [&](const PlanRef& plan, const RowChunk& chunk, const CoreShares& shares) {
                        return SumParts(stream, shape, args.layout, plan, chunk, shares, gradients);
                      });
}

template <typename T>
Status TTUpdate(cudaStream_t stream, const TTArgs<T>& args, const Lookups* lookups, const CoreTables<T>& tables,
                const float* out_gradient, const TTStep& step, float* weight_gradient, float* applied, void* memory) {
  const TTShape& shape = args.shape;
  Workspace workspace(memory);
  const UpdateBuffers buffers(shape, workspace);
  return ForEachShare(
      stream, args, lookups, out_gradient, weight_gradient, workspace,
      [&](const PlanRef& plan, const RowChunk& chunk, const CoreShares& shares) -> Status {
        const bool last = chunk.end >= args.layout.n;
        if (chunk.begin == 0 && last && !step.skip_nonfinite)
          return SumPartsAndStep(stream, shape, args.layout, plan, shares, tables, step, applied);
        if (chunk.begin == 0)
          JAX_TT_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(
              buffers.gradients.touched, 0, static_cast<size_t>(NumSlices(shape)) * sizeof(int32_t), stream)));
        JAX_TT_RETURN_IF_ERROR(SumParts(stream, shape, args.layout, plan, chunk, shares, buffers.gradients));
        if (!last) return {};
        return ApplyStep(stream, shape, plan, tables, buffers.gradients, step, buffers.stop, applied);
      });
}

template <typename T>
Status TTApply(cudaStream_t stream, const TTShape& shape, const CoreTables<T>& tables, const CoreGradients& gradients,
               const TTStep& step, float* applied, void* workspace) {
  return ApplyStep(stream, shape, PlanRef{}, tables, gradients, step, static_cast<int32_t*>(workspace), applied);
}

#define JAX_TT_INSTANTIATE(T)                                                                                      \
  template Status TTForward(cudaStream_t, const TTArgs<T>&, float*, void*);                                        \
  template Status TTBackward(cudaStream_t, const TTArgs<T>&, const Lookups*, const float*, const CoreGradients&,   \
                             float*, void*);                                                                       \
  template Status TTUpdate(cudaStream_t, const TTArgs<T>&, const Lookups*, const CoreTables<T>&, const float*,     \
                           const TTStep&, float*, float*, void*);                                                  \
  template Status TTApply(cudaStream_t, const TTShape&, const CoreTables<T>&, const CoreGradients&, const TTStep&, \
                          float*, void*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
