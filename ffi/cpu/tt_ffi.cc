// FFI handlers of the TT operations, which check shapes and types.
#include <algorithm>
#include <limits>
#include <numeric>

#include "ffi/cpu/args.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/ids.h"
#include "ffi/cpu/plan.h"
#include "ffi/cpu/plan_check.h"
#include "ffi/cpu/tt_args.h"
#include "ffi/cpu/tt_backward.h"
#include "ffi/cpu/tt_forward.h"
#include "ffi/cpu/tt_update.h"

namespace jax_tt {
namespace {

// The problem of one call, and the memory that its plan may need.
template <typename T>
struct TTCall {
  TTProblem<T> problem;
  int64_t saved_size = 0;   // elements of the saved products, if any
  bool saved_valid = true;  // whether the saved products belong to this plan

  Status Read(const ffi::Dictionary& attrs, const BatchArgs& batch, const ffi::AnyBuffer& plan, const Args& cores,
              const Pool& pool) {
    Lookups lookups;
    JAX_TT_RETURN_IF_ERROR(ReadTTProblem(attrs, batch, cores, 0, &lookups, &problem, &saved_size));
    return ReadPlan(lookups, plan, pool);
  }

 private:
  Status ReadPlan(const Lookups& lookups, const ffi::AnyBuffer& plan, const Pool& pool) {
    JAX_TT_RETURN_IF_ERROR(CheckOffsets(lookups.offsets, lookups.groups, lookups.bags, lookups.capacity));
    JAX_TT_RETURN_IF_ERROR(Data(plan, "plan", -1, &problem.plan));
    if (Count(plan) >= problem.layout.size() && IsPlanOf(problem.layout, lookups, problem.plan))
      return CheckPlan(problem.shape, problem.contraction, problem.layout, problem.groups * problem.bags, problem.plan);
    int32_t* own = nullptr;
    own_plan_.Request(&own, problem.layout.size());
    JAX_TT_RETURN_IF_ERROR(own_plan_.Allocate());
    problem.plan = own;
    saved_valid = false;
    return BuildTTPlan(problem.shape, problem.contraction, lookups, pool, own);
  }

  Workspace own_plan_;
};

ffi::Error PlanImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer sentinel,
                    ffi::Result<ffi::AnyBuffer> plan, ffi::Dictionary attrs) {
  return ToError(
      [&]() -> Status {
        TTShape shape;
        Lookups lookups;
        int64_t hint = 0;
        int32_t* data = nullptr;
        JAX_TT_RETURN_IF_ERROR(ReadTable(attrs, &shape));
        JAX_TT_RETURN_IF_ERROR(ReadLookups(attrs, ids, offsets, shape.d, &lookups));
        JAX_TT_RETURN_IF_ERROR(ReadHint(attrs, lookups.size(), &hint));
        JAX_TT_RETURN_IF_ERROR(CheckSentinel(sentinel, lookups.table));
        JAX_TT_RETURN_IF_ERROR(Data(*plan, "plan", -1, &data));
        const Contraction contraction = ChooseContraction(shape, hint);
        if (Count(*plan) < MakeLayout(shape, contraction, lookups.size()).size())
          return InvalidArgument("the plan is too small for this batch");
        PreferHugePages({*plan});
        return BuildTTPlan(shape, contraction, lookups, MakePool(threads), data);
      }(),
      "tt_plan");
}

ffi::Error ForwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer plan, Args cores, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Result<ffi::AnyBuffer> saved, ffi::Dictionary attrs) {
  return ToError(DispatchCores(cores, 0,
                               [&](auto tag) -> Status {
                                 using T = typename decltype(tag)::type;
                                 using C = typename TTProblem<T>::C;
                                 const Pool pool = MakePool(threads);
                                 TTCall<T> call;
                                 C* out_data = nullptr;
                                 C* saved_data = nullptr;
                                 JAX_TT_RETURN_IF_ERROR(call.Read(attrs, {ids, offsets, weights}, plan, cores, pool));
                                 JAX_TT_RETURN_IF_ERROR(Data(*out, "out", call.problem.out_size(), &out_data));
                                 JAX_TT_RETURN_IF_ERROR(OptionalData(*saved, "saved", call.saved_size, &saved_data));
                                 PreferHugePages({*out, *saved});
                                 return TTForward(call.problem, pool, /*add=*/false, out_data, saved_data);
                               }),
                 "tt_forward");
}

ffi::Error BackwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                        ffi::AnyBuffer plan, ffi::AnyBuffer saved, ffi::AnyBuffer out_gradient, Args cores,
                        ffi::Result<ffi::AnyBuffer> touched, ffi::Result<ffi::AnyBuffer> weight_gradient,
                        Rets gradients, ffi::Dictionary attrs) {
  return ToError(
      DispatchCores(cores, 0,
                    [&](auto tag) -> Status {
                      using T = typename decltype(tag)::type;
                      using C = typename TTProblem<T>::C;
                      const Pool pool = MakePool(threads);
                      TTCall<T> call;
                      CoreGradients<C> sink;
                      const C* g = nullptr;
                      const C* saved_data = nullptr;
                      C* weight_data = nullptr;
                      int32_t* touched_data = nullptr;
                      JAX_TT_RETURN_IF_ERROR(call.Read(attrs, {ids, offsets, weights}, plan, cores, pool));
                      const TTShape& shape = call.problem.shape;
                      JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", call.problem.out_size(), &g));
                      JAX_TT_RETURN_IF_ERROR(OptionalData(saved, "saved", call.saved_size, &saved_data));
                      JAX_TT_RETURN_IF_ERROR(
                          OptionalData(*weight_gradient, "weight gradient", call.problem.layout.n, &weight_data));
                      const int64_t slices = std::accumulate(shape.p, shape.p + shape.d, int64_t{0});
                      JAX_TT_RETURN_IF_ERROR(Data(*touched, "touched", slices, &touched_data));
                      for (int k = 0; k < shape.d; touched_data += shape.p[k++]) {
                        auto buffer = gradients.get<ffi::AnyBuffer>(static_cast<size_t>(k));
                        if (!buffer.has_value()) return InvalidArgument("a core gradient is missing");
                        JAX_TT_RETURN_IF_ERROR(Data(**buffer, "core gradient", shape.core_size(k), &sink.gradient[k]));
                        sink.touched[k] = touched_data;
                      }
                      JAX_TT_RETURN_IF_ERROR(TTBackward(call.problem, pool, g, call.saved_valid ? saved_data : nullptr,
                                                        sink, weight_data));
                      ClearUntouched(shape, pool, sink);
                      return {};
                    }),
      "tt_backward");
}

ffi::Error UpdateImpl(ffi::ThreadPool threads, ffi::AnyBuffer /*forward_out*/, ffi::AnyBuffer ids,
                      ffi::AnyBuffer offsets, ffi::AnyBuffer weights, ffi::AnyBuffer plan, ffi::AnyBuffer saved,
                      ffi::AnyBuffer out_gradient, ffi::AnyBuffer hyper, ffi::AnyBuffer scale, ffi::AnyBuffer seed,
                      Args tables, ffi::Result<ffi::AnyBuffer> applied, ffi::Result<ffi::AnyBuffer> weight_gradient,
                      Rets results, ffi::Dictionary attrs) {
  return ToError(
      DispatchCores(tables, 0,
                    [&](auto tag) -> Status {
                      using T = typename decltype(tag)::type;
                      using C = typename TTProblem<T>::C;
                      const Pool pool = MakePool(threads);
                      TTCall<T> call;
                      OptimizerStep step;
                      CoreTables<T> in_place;
                      const C* g = nullptr;
                      const C* saved_data = nullptr;
                      C* weight_data = nullptr;
                      float* applied_data = nullptr;
                      JAX_TT_RETURN_IF_ERROR(ReadStep(attrs, hyper, scale, seed, &step));
                      JAX_TT_RETURN_IF_ERROR(call.Read(attrs, {ids, offsets, weights}, plan, tables, pool));
                      JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", call.problem.out_size(), &g));
                      JAX_TT_RETURN_IF_ERROR(OptionalData(saved, "saved", call.saved_size, &saved_data));
                      JAX_TT_RETURN_IF_ERROR(
                          OptionalData(*weight_gradient, "weight gradient", call.problem.layout.n, &weight_data));
                      JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
                      JAX_TT_RETURN_IF_ERROR(
                          ReadTables(call.problem.shape, step.traits(), tables, 0, results, in_place.table));
                      return TTUpdate(call.problem, pool, in_place, g, call.saved_valid ? saved_data : nullptr, step,
                                      weight_data, applied_data);
                    }),
      "tt_update");
}

ffi::Error ApplyImpl(ffi::ThreadPool threads, ffi::AnyBuffer touched, ffi::AnyBuffer hyper, ffi::AnyBuffer scale,
                     ffi::AnyBuffer seed, Args args, ffi::Result<ffi::AnyBuffer> applied, Rets results,
                     ffi::Dictionary attrs) {
  return ToError(
      [&]() -> Status {
        TTShape shape;
        JAX_TT_RETURN_IF_ERROR(ReadTable(attrs, &shape));
        return DispatchCores(args, static_cast<size_t>(shape.d), [&](auto tag) -> Status {
          using T = typename decltype(tag)::type;
          using C = typename ComputeType<T>::type;
          OptimizerStep step;
          CoreGradients<C> gradients;
          CoreTables<T> in_place;
          int32_t* touched_data = nullptr;
          float* applied_data = nullptr;
          JAX_TT_RETURN_IF_ERROR(ReadStep(attrs, hyper, scale, seed, &step));
          const int64_t slices = std::accumulate(shape.p, shape.p + shape.d, int64_t{0});
          JAX_TT_RETURN_IF_ERROR(Data(touched, "touched", slices, &touched_data));
          JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
          JAX_TT_RETURN_IF_ERROR(ReadCores<C>(shape, args, 0, gradients.gradient));
          for (int k = 0; k < shape.d; touched_data += shape.p[k++]) gradients.touched[k] = touched_data;
          JAX_TT_RETURN_IF_ERROR(
              ReadTables(shape, step.traits(), args, static_cast<size_t>(shape.d), results, in_place.table));
          return TTApply(shape, MakePool(threads), in_place, gradients, step, applied_data);
        });
      }(),
      "tt_apply");
}

}  // namespace

// d = number of cores, n = ids, G = groups, B = bags of a group.
XLA_FFI_DEFINE_HANDLER_SYMBOL(TTPlanCpu, PlanImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G], split: [G.., n / G, d]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 []
                                  .Ret<ffi::AnyBuffer>()  // plan s32 [PlanLayout::size() or more]
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // ids
                                  .Arg<ffi::AnyBuffer>()  // offsets
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // plan
                                  .RemainingArgs()        // cores
                                  .Ret<ffi::AnyBuffer>()  // out [G.., B, D]
                                  .Ret<ffi::AnyBuffer>()  // saved [n, elements], or empty
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTBackwardCpu, BackwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // ids
                                  .Arg<ffi::AnyBuffer>()  // offsets
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // plan
                                  .Arg<ffi::AnyBuffer>()  // saved, or empty
                                  .Arg<ffi::AnyBuffer>()  // out gradient [G.., B, D]
                                  .RemainingArgs()        // cores
                                  .Ret<ffi::AnyBuffer>()  // touched s32 [sum of row factors]
                                  .Ret<ffi::AnyBuffer>()  // weight gradient [n], or empty
                                  .RemainingRets()        // core gradients
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTUpdateCpu, UpdateImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // result of the forward pass: orders the update after it
                                  .Arg<ffi::AnyBuffer>()  // ids
                                  .Arg<ffi::AnyBuffer>()  // offsets
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // plan
                                  .Arg<ffi::AnyBuffer>()  // saved, or empty
                                  .Arg<ffi::AnyBuffer>()  // out gradient [G.., B, D]
                                  .Arg<ffi::AnyBuffer>()  // hyper-parameters f32
                                  .Arg<ffi::AnyBuffer>()  // gradient scale f32 [2]
                                  .Arg<ffi::AnyBuffer>()  // seed u32 [2]
                                  .RemainingArgs()        // cores, then slots core by core
                                  .Ret<ffi::AnyBuffer>()  // applied f32 []
                                  .Ret<ffi::AnyBuffer>()  // weight gradient [n], or empty
                                  .RemainingRets()        // cores and slots, in place
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTApplyCpu, ApplyImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // touched s32 [sum of row factors]
                                  .Arg<ffi::AnyBuffer>()  // hyper-parameters f32
                                  .Arg<ffi::AnyBuffer>()  // gradient scale f32 [2]
                                  .Arg<ffi::AnyBuffer>()  // seed u32 [2]
                                  .RemainingArgs()        // core gradients, cores, then slots core by core
                                  .Ret<ffi::AnyBuffer>()  // applied f32 []
                                  .RemainingRets()        // cores and slots, in place
                                  .Attrs());

}  // namespace jax_tt
