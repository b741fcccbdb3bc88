// FFI handlers of the TT operations on the GPU: shapes and types are checked here, launches are elsewhere.
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "ffi/common/tt_tables.h"
#include "ffi/cuda/gpu_args.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/notices.h"
#include "ffi/cuda/stream.h"
#include "ffi/cuda/tables/works.h"
#include "ffi/cuda/tt/tt.h"

namespace jax_tt {
namespace {

// As DispatchCores, for the storage types that the GPU takes.
template <typename F>
Status DispatchGpuCores(const Args& args, size_t first, F&& body) {
  auto core = args.get<ffi::AnyBuffer>(first);
  if (!core.has_value()) return InvalidArgument("a core is missing");
  return DispatchGpuStorage(core->element_type(), std::forward<F>(body));
}

// A table and its batch.
template <typename T>
struct TTCall {
  TTArgs<T> args;
  Lookups lookups;
  bool check_plan = false;

  Status Read(const TTTableArgs& given) {
    args.shape = given.shape;
    JAX_TT_RETURN_IF_ERROR(ReadCall<T>(given.attrs, given.batch, given.args, given.first_core, &lookups, &args));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(given.attrs, "resharded", &check_plan));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(given.attrs, "tensor_float32", &args.tensor_float32));
    args.layout = MakeCudaPlan(args.shape, lookups.size());
    return {};
  }
  const Lookups* unsure() const { return check_plan ? &lookups : nullptr; }
};

// The memory of a plan in `buffer`.
Status ReadPlan(const ffi::AnyBuffer& buffer, const CudaPlan& layout, int32_t** plan) {
  JAX_TT_RETURN_IF_ERROR(Data(buffer, "plan", -1, plan));
  if (Count(buffer) < layout.size()) return InvalidArgument("the plan is too small for this batch");
  return {};
}

// The plan of a table, then its forward pass.
Status ReadForward(const TTTableArgs& given, const TTForwardArgs& own, TableWork* work) {
  return DispatchGpuCores(given.args, given.first_core, [&](auto tag) -> Status {
    TTCall<typename decltype(tag)::type> call;
    int32_t* plan = nullptr;
    float* out = nullptr;
    const float* sentinel = nullptr;
    JAX_TT_RETURN_IF_ERROR(call.Read(given));
    FindNotice(given.shape.num_embeddings, &call.lookups);
    JAX_TT_RETURN_IF_ERROR(Data(own.sentinel, "sentinel", 1, &sentinel));
    JAX_TT_RETURN_IF_ERROR(Data(own.out, "out", call.args.out_size(), &out));
    const bool own_plan = Count(own.plan) == 0;
    if (!own_plan) JAX_TT_RETURN_IF_ERROR(ReadPlan(own.plan, call.args.layout, &plan));
    *work = {TTForwardWorkspace(call.args.shape, call.args.layout.n, own_plan),
             [call, plan, sentinel, out](TableQueue& queue, void* memory) {
               return TTForward(queue, call.args, call.lookups, sentinel, /*hash=*/call.check_plan, plan, out, memory);
             }};
    return {};
  });
}

// What a backward pass and an update have in common.
template <typename T>
struct GradientCall : TTCall<T> {
  const float* out_gradient = nullptr;
  float* weight_gradient = nullptr;

  Status Read(const TTTableArgs& given, const TTGradientArgs& own) {
    int32_t* plan = nullptr;
    JAX_TT_RETURN_IF_ERROR(TTCall<T>::Read(given));
    JAX_TT_RETURN_IF_ERROR(ReadPlan(own.plan, this->args.layout, &plan));
    this->args.plan.given = plan;
    JAX_TT_RETURN_IF_ERROR(Data(own.out_gradient, "out gradient", this->args.out_size(), &out_gradient));
    return OptionalData(own.weight_gradient, "weight gradient", this->args.layout.n, &weight_gradient);
  }
  TTAsked Asked(bool skip_nonfinite) const { return {weight_gradient != nullptr, this->check_plan, skip_nonfinite}; }
};

Status ReadBackward(const TTTableArgs& given, const ffi::AnyBuffer& touched, const TTGradientArgs& own,
                    TableWork* work) {
  return DispatchGpuCores(given.args, given.first_core, [&](auto tag) -> Status {
    GradientCall<typename decltype(tag)::type> call;
    CoreGradients gradients;
    JAX_TT_RETURN_IF_ERROR(call.Read(given, own));
    const TTShape& shape = call.args.shape;
    const int64_t slices = std::accumulate(shape.p, shape.p + shape.d, int64_t{0});
    JAX_TT_RETURN_IF_ERROR(Data(touched, "touched", slices, &gradients.touched));
    for (int k = 0; k < shape.d; ++k) {
      auto buffer = own.rets.get<ffi::AnyBuffer>(own.first_result + static_cast<size_t>(k));
      if (!buffer.has_value()) return InvalidArgument("a core gradient is missing");
      JAX_TT_RETURN_IF_ERROR(Data(**buffer, "core gradient", shape.core_size(k), &gradients.core[k]));
    }
    *work = {TTBackwardWorkspace(shape, call.args.layout.n, call.Asked(/*skip_nonfinite=*/false)),
             [call, gradients](TableQueue& queue, void* memory) {
               return TTBackward(queue, call.args, call.unsure(), call.out_gradient, gradients, call.weight_gradient,
                                 memory);
             }};
    return {};
  });
}

Status ReadStep(const StepArgs& args, TTStep* step) {
  const float *hyper = nullptr, *scale = nullptr;
  JAX_TT_RETURN_IF_ERROR(args.Numbers(&hyper, &scale));
  *step = {args.kind, {hyper, scale, args.seed, args.stochastic_rounding}, args.skip_nonfinite};
  return {};
}

Status ReadUpdate(const TTTableArgs& given, const TTGradientArgs& own, const StepArgs& step_args, float* applied,
                  TableWork* work) {
  return DispatchGpuCores(given.args, given.first_core, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    GradientCall<T> call;
    CoreTables<T> tables;
    JAX_TT_RETURN_IF_ERROR(call.Read(given, own));
    const TTShape& shape = call.args.shape;
    JAX_TT_RETURN_IF_ERROR(
        ReadTables(shape, step_args.traits(), given.args, given.first_core, own.rets, own.first_result, tables.core));
    TTStep step;
    JAX_TT_RETURN_IF_ERROR(ReadStep(step_args, &step));
    *work = {TTUpdateWorkspace(shape, call.args.layout.n, call.Asked(step.skip_nonfinite)),
             [call, tables, step, applied](TableQueue& queue, void* memory) {
               return TTUpdate(queue, call.args, call.unsure(), tables, call.out_gradient, step, call.weight_gradient,
                               applied, memory);
             }};
    return {};
  });
}

Status ReadApply(const TTApplyArgs& given, const StepArgs& step_args, float* applied, TableWork* work) {
  return DispatchGpuCores(given.args, given.first_core, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    const TTShape& shape = given.shape;
    CoreGradients gradients;
    CoreTables<T> tables;
    TTStep step;
    JAX_TT_RETURN_IF_ERROR(ReadStep(step_args, &step));
    const int64_t slices = std::accumulate(shape.p, shape.p + shape.d, int64_t{0});
    JAX_TT_RETURN_IF_ERROR(Data(given.touched, "touched", slices, &gradients.touched));
    JAX_TT_RETURN_IF_ERROR(ReadCores<float>(shape, given.args, given.first_gradient, gradients.core));
    JAX_TT_RETURN_IF_ERROR(ReadTables(shape, step_args.traits(), given.args, given.first_core, given.rets,
                                      given.first_result, tables.core));
    *work = {TTApplyWorkspace(), [=](TableQueue& queue, void* memory) {
               return TTApply(queue, shape, tables, gradients, step, applied, memory);
             }};
    return {};
  });
}

// Reads the works of a call with read(works), and runs them.
template <typename Read>
Status Run(cudaStream_t stream, const ffi::AnyBuffer& workspace, Read read) {
  std::vector<TableWork> works;
  void* memory = nullptr;
  JAX_TT_RETURN_IF_ERROR(read(&works));
  JAX_TT_RETURN_IF_ERROR(ReadWorkspace(workspace, WorksMemory(works), &memory));
  return RunWorks(stream, works, memory);
}
// The same where the workspace is the last of several results.
template <typename Read>
Status Run(cudaStream_t stream, const Rets& rets, Read read) {
  std::optional<ffi::AnyBuffer> workspace;
  JAX_TT_RETURN_IF_ERROR(LastResult(rets, &workspace));
  return Run(stream, *workspace, read);
}

ffi::Error PlanImpl(cudaStream_t stream, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer sentinel,
                    ffi::Result<ffi::AnyBuffer> plan, ffi::Result<ffi::AnyBuffer> workspace, ffi::Dictionary attrs) {
  const auto read = [&](std::vector<TableWork>* works) -> Status {
    TTShape shape;
    Lookups lookups;
    const float* sentinel_data = nullptr;
    int32_t* data = nullptr;
    bool resharded = false;
    JAX_TT_RETURN_IF_ERROR(ReadTable(attrs, &shape));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "resharded", &resharded));
    JAX_TT_RETURN_IF_ERROR(ReadLookups(attrs, ids, offsets, shape.d, &lookups));
    FindNotice(shape.num_embeddings, &lookups);
    JAX_TT_RETURN_IF_ERROR(Data(sentinel, "sentinel", 1, &sentinel_data));
    const CudaPlan layout = MakeCudaPlan(shape, lookups.size());
    JAX_TT_RETURN_IF_ERROR(ReadPlan(*plan, layout, &data));
    works->push_back({PlanWorkspace(shape, layout), [=](TableQueue& queue, void* memory) -> Status {
                        BuildPlan(queue, shape, layout, lookups, sentinel_data, /*hash=*/resharded, data, memory);
                        return {};
                      }});
    return {};
  };
  return ToError(Run(stream, *workspace, read), attrs);
}

ffi::Error ForwardImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto read = [&](std::vector<TableWork>* works) {
    return ReadTTForwardTables({args, rets, attrs, rets.size() - 1},
                               [works](const TTTableArgs& given, const TTForwardArgs& own) {
                                 return ReadForward(given, own, &works->emplace_back());
                               });
  };
  return ToError(Run(stream, rets, read), attrs);
}

ffi::Error BackwardImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto read = [&](std::vector<TableWork>* works) {
    return ReadTTBackwardTables(
        {args, rets, attrs, rets.size() - 1},
        [works](const TTTableArgs& given, const ffi::AnyBuffer& touched, const TTGradientArgs& own) {
          return ReadBackward(given, touched, own, &works->emplace_back());
        });
  };
  return ToError(Run(stream, rets, read), attrs);
}

ffi::Error UpdateImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto read = [&](std::vector<TableWork>* works) {
    return ReadTTUpdateTables(
        {args, rets, attrs, rets.size() - 1},
        [works](const TTTableArgs& given, const TTGradientArgs& own, const StepArgs& step, float* applied) {
          return ReadUpdate(given, own, step, applied, &works->emplace_back());
        });
  };
  return ToError(Run(stream, rets, read), attrs);
}

ffi::Error ApplyImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto read = [&](std::vector<TableWork>* works) {
    return ReadTTApplyTables({args, rets, attrs, rets.size() - 1},
                             [works](const TTApplyArgs& given, const StepArgs& step, float* applied) {
                               return ReadApply(given, step, applied, &works->emplace_back());
                             });
  };
  return ToError(Run(stream, rets, read), attrs);
}

}  // namespace

// As on the CPU (ffi/cpu/tt/ffi.cc), with the stream for the thread pool and one result more, the workspace u8 [bytes].
XLA_FFI_DEFINE_HANDLER_SYMBOL(TTPlanCuda, PlanImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // ids
                                  .Arg<ffi::AnyBuffer>()  // offsets
                                  .Arg<ffi::AnyBuffer>()  // sentinel
                                  .Ret<ffi::AnyBuffer>()  // plan
                                  .Ret<ffi::AnyBuffer>()  // workspace
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

// ffi/common/tt_tables.h describes the arguments and results of the others; the last result is the workspace u8
// [bytes].
XLA_FFI_DEFINE_HANDLER_SYMBOL(TTForwardCuda, ForwardImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTBackwardCuda, BackwardImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTUpdateCuda, UpdateImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTApplyCuda, ApplyImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_tt
