// FFI handlers of the TT operations on the GPU: shapes and types are checked here, launches are elsewhere.
#include <numeric>

#include "ffi/common/call_args.h"
#include "ffi/cuda/gpu_args.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/notices.h"
#include "ffi/cuda/stream.h"
#include "ffi/cuda/tt.h"

namespace jax_tt {
namespace {

// As DispatchCores, for the storage types that the GPU takes.
template <typename F>
Status DispatchGpuCores(const Args& args, size_t first, F&& body) {
  auto core = args.get<ffi::AnyBuffer>(first);
  if (!core.has_value()) return InvalidArgument("a core is missing");
  return DispatchGpuStorage(core->element_type(), std::forward<F>(body));
}

template <typename T>
struct TTCall {
  TTArgs<T> args;
  Lookups lookups;
  bool check_plan = false;

  Status Read(const ffi::Dictionary& attrs, const BatchArgs& batch, const ffi::AnyBuffer& plan, const Args& cores) {
    JAX_TT_RETURN_IF_ERROR(ReadTable(attrs, &args.shape));
    JAX_TT_RETURN_IF_ERROR(ReadCall<T>(attrs, batch, cores, 0, &lookups, &args));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "resharded", &check_plan));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "tensor_float32", &args.tensor_float32));
    args.layout = MakeCudaPlan(args.shape, lookups.size());
    JAX_TT_RETURN_IF_ERROR(Data(plan, "plan", -1, &args.plan.given));
    if (Count(plan) < args.layout.size()) return InvalidArgument("the plan is too small for this batch");
    return {};
  }
  const Lookups* unsure() const { return check_plan ? &lookups : nullptr; }
};

ffi::Error PlanImpl(cudaStream_t stream, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer sentinel,
                    ffi::Result<ffi::AnyBuffer> plan, ffi::Result<ffi::AnyBuffer> workspace, ffi::Dictionary attrs) {
  return ToError(
      [&]() -> Status {
        TTShape shape;
        Lookups lookups;
        const float* sentinel_data = nullptr;
        int32_t* data = nullptr;
        void* memory = nullptr;
        bool resharded = false;
        JAX_TT_RETURN_IF_ERROR(ReadTable(attrs, &shape));
        JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "resharded", &resharded));
        JAX_TT_RETURN_IF_ERROR(ReadLookups(attrs, ids, offsets, shape.d, &lookups));
        FindNotice(shape.num_embeddings, &lookups);
        JAX_TT_RETURN_IF_ERROR(Data(sentinel, "sentinel", 1, &sentinel_data));
        JAX_TT_RETURN_IF_ERROR(Data(*plan, "plan", -1, &data));
        const CudaPlan layout = MakeCudaPlan(shape, lookups.size());
        if (Count(*plan) < layout.size()) return InvalidArgument("the plan is too small for this batch");
        JAX_TT_RETURN_IF_ERROR(ReadWorkspace(*workspace, PlanWorkspace(layout), &memory));
        return BuildPlan(stream, shape, layout, lookups, sentinel_data, /*hash=*/resharded, data, memory);
      }(),
      "tt_plan");
}

ffi::Error ForwardImpl(cudaStream_t stream, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer plan, Args cores, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Result<ffi::AnyBuffer> /*saved*/, ffi::Result<ffi::AnyBuffer> workspace,
                       ffi::Dictionary attrs) {
  return ToError(DispatchGpuCores(cores, 0,
                                  [&](auto tag) -> Status {
                                    TTCall<typename decltype(tag)::type> call;
                                    float* out_data = nullptr;
                                    void* memory = nullptr;
                                    JAX_TT_RETURN_IF_ERROR(call.Read(attrs, {ids, offsets, weights}, plan, cores));
                                    JAX_TT_RETURN_IF_ERROR(Data(*out, "out", call.args.out_size(), &out_data));
                                    JAX_TT_RETURN_IF_ERROR(ReadWorkspace(
                                        *workspace, TTForwardWorkspace(call.args.shape, call.args.layout.n), &memory));
                                    return TTForward(stream, call.args, out_data, memory);
                                  }),
                 "tt_forward");
}

ffi::Error BackwardImpl(cudaStream_t stream, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                        ffi::AnyBuffer plan, ffi::AnyBuffer /*saved*/, ffi::AnyBuffer out_gradient, Args cores,
                        ffi::Result<ffi::AnyBuffer> touched, ffi::Result<ffi::AnyBuffer> weight_gradient, Rets results,
                        ffi::Dictionary attrs) {
  return ToError(
      DispatchGpuCores(
          cores, 0,
          [&](auto tag) -> Status {
            TTCall<typename decltype(tag)::type> call;
            CoreGradients gradients;
            const float* g = nullptr;
            float* weight_data = nullptr;
            void* memory = nullptr;
            JAX_TT_RETURN_IF_ERROR(call.Read(attrs, {ids, offsets, weights}, plan, cores));
            const TTShape& shape = call.args.shape;
            JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", call.args.out_size(), &g));
            JAX_TT_RETURN_IF_ERROR(OptionalData(*weight_gradient, "weight gradient", call.args.layout.n, &weight_data));
            const int64_t slices = std::accumulate(shape.p, shape.p + shape.d, int64_t{0});
            JAX_TT_RETURN_IF_ERROR(Data(*touched, "touched", slices, &gradients.touched));
            for (int k = 0; k < shape.d; ++k) {
              auto buffer = results.get<ffi::AnyBuffer>(static_cast<size_t>(k));
              if (!buffer.has_value()) return InvalidArgument("a core gradient is missing");
              JAX_TT_RETURN_IF_ERROR(Data(**buffer, "core gradient", shape.core_size(k), &gradients.core[k]));
            }
            const TTAsked asked{.weights = weight_data != nullptr, .check_plan = call.check_plan};
            JAX_TT_RETURN_IF_ERROR(
                ReadLastWorkspace(results, TTBackwardWorkspace(shape, call.args.layout.n, asked), &memory));
            return TTBackward(stream, call.args, call.unsure(), g, gradients, weight_data, memory);
          }),
      "tt_backward");
}

Status ReadTTStep(const ffi::Dictionary& attrs, const ffi::AnyBuffer& hyper, const ffi::AnyBuffer& scale,
                  const ffi::AnyBuffer& seed, TTStep* step) {
  StepArgs args;
  JAX_TT_RETURN_IF_ERROR(ReadStepArgs(attrs, hyper, scale, seed, &args));
  *step = {args.kind, {args.hyper, args.scale, args.seed, args.stochastic_rounding}, args.skip_nonfinite};
  return {};
}

ffi::Error UpdateImpl(cudaStream_t stream, ffi::AnyBuffer /*forward_out*/, ffi::AnyBuffer ids, ffi::AnyBuffer offsets,
                      ffi::AnyBuffer weights, ffi::AnyBuffer plan, ffi::AnyBuffer /*saved*/,
                      ffi::AnyBuffer out_gradient, ffi::AnyBuffer hyper, ffi::AnyBuffer scale, ffi::AnyBuffer seed,
                      Args tables, ffi::Result<ffi::AnyBuffer> applied, ffi::Result<ffi::AnyBuffer> weight_gradient,
                      Rets results, ffi::Dictionary attrs) {
  return ToError(
      DispatchGpuCores(
          tables, 0,
          [&](auto tag) -> Status {
            using T = typename decltype(tag)::type;
            TTCall<T> call;
            TTStep step;
            CoreTables<T> in_place;
            const float* g = nullptr;
            float *weight_data = nullptr, *applied_data = nullptr;
            void* memory = nullptr;
            JAX_TT_RETURN_IF_ERROR(ReadTTStep(attrs, hyper, scale, seed, &step));
            JAX_TT_RETURN_IF_ERROR(call.Read(attrs, {ids, offsets, weights}, plan, tables));
            JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", call.args.out_size(), &g));
            JAX_TT_RETURN_IF_ERROR(OptionalData(*weight_gradient, "weight gradient", call.args.layout.n, &weight_data));
            JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
            JAX_TT_RETURN_IF_ERROR(
                ReadTables(call.args.shape, RuleTraits(step.kind), tables, 0, results, 0, in_place.core));
            const TTAsked asked{weight_data != nullptr, call.check_plan, step.skip_nonfinite};
            JAX_TT_RETURN_IF_ERROR(
                ReadLastWorkspace(results, TTUpdateWorkspace(call.args.shape, call.args.layout.n, asked), &memory));
            return TTUpdate(stream, call.args, call.unsure(), in_place, g, step, weight_data, applied_data, memory);
          }),
      "tt_update");
}

ffi::Error ApplyImpl(cudaStream_t stream, ffi::AnyBuffer touched, ffi::AnyBuffer hyper, ffi::AnyBuffer scale,
                     ffi::AnyBuffer seed, Args args, ffi::Result<ffi::AnyBuffer> applied, Rets results,
                     ffi::Dictionary attrs) {
  return ToError(
      [&]() -> Status {
        TTShape shape;
        JAX_TT_RETURN_IF_ERROR(ReadTable(attrs, &shape));
        const size_t first_core = static_cast<size_t>(shape.d);
        return DispatchGpuCores(args, first_core, [&](auto tag) -> Status {
          using T = typename decltype(tag)::type;
          TTStep step;
          CoreGradients gradients;
          CoreTables<T> in_place;
          float* applied_data = nullptr;
          void* memory = nullptr;
          JAX_TT_RETURN_IF_ERROR(ReadTTStep(attrs, hyper, scale, seed, &step));
          const int64_t slices = std::accumulate(shape.p, shape.p + shape.d, int64_t{0});
          JAX_TT_RETURN_IF_ERROR(Data(touched, "touched", slices, &gradients.touched));
          JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
          JAX_TT_RETURN_IF_ERROR(ReadCores<float>(shape, args, 0, gradients.core));
          JAX_TT_RETURN_IF_ERROR(ReadTables(shape, RuleTraits(step.kind), args, first_core, results, 0, in_place.core));
          JAX_TT_RETURN_IF_ERROR(ReadLastWorkspace(results, TTApplyWorkspace(), &memory));
          return TTApply(stream, shape, in_place, gradients, step, applied_data, memory);
        });
      }(),
      "tt_apply");
}

}  // namespace

// As on the CPU (ffi/cpu/tt_ffi.cc), with the stream for the thread pool and one result more, the workspace u8 [bytes].
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTForwardCuda, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // ids
                                  .Arg<ffi::AnyBuffer>()  // offsets
                                  .Arg<ffi::AnyBuffer>()  // weights
                                  .Arg<ffi::AnyBuffer>()  // plan
                                  .RemainingArgs()        // cores
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // saved: nothing is
                                  .Ret<ffi::AnyBuffer>()  // workspace
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTBackwardCuda, BackwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // ids
                                  .Arg<ffi::AnyBuffer>()  // offsets
                                  .Arg<ffi::AnyBuffer>()  // weights
                                  .Arg<ffi::AnyBuffer>()  // plan
                                  .Arg<ffi::AnyBuffer>()  // saved
                                  .Arg<ffi::AnyBuffer>()  // out gradient
                                  .RemainingArgs()        // cores
                                  .Ret<ffi::AnyBuffer>()  // touched
                                  .Ret<ffi::AnyBuffer>()  // weight gradient
                                  .RemainingRets()        // core gradients, workspace
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTUpdateCuda, UpdateImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // result of the forward pass: only to run after it
                                  .Arg<ffi::AnyBuffer>()  // ids
                                  .Arg<ffi::AnyBuffer>()  // offsets
                                  .Arg<ffi::AnyBuffer>()  // weights
                                  .Arg<ffi::AnyBuffer>()  // plan
                                  .Arg<ffi::AnyBuffer>()  // saved
                                  .Arg<ffi::AnyBuffer>()  // out gradient
                                  .Arg<ffi::AnyBuffer>()  // hyper-parameters
                                  .Arg<ffi::AnyBuffer>()  // gradient scale f32 [2]
                                  .Arg<ffi::AnyBuffer>()  // seed
                                  .RemainingArgs()        // cores, then slots core by core
                                  .Ret<ffi::AnyBuffer>()  // applied
                                  .Ret<ffi::AnyBuffer>()  // weight gradient
                                  .RemainingRets()        // cores and slots, in place; workspace
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTApplyCuda, ApplyImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // touched
                                  .Arg<ffi::AnyBuffer>()  // hyper-parameters
                                  .Arg<ffi::AnyBuffer>()  // gradient scale f32 [2]
                                  .Arg<ffi::AnyBuffer>()  // seed
                                  .RemainingArgs()        // core gradients, cores, then slots core by core
                                  .Ret<ffi::AnyBuffer>()  // applied
                                  .RemainingRets()        // cores and slots, in place; workspace
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_tt
