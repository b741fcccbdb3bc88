// FFI handlers of the TT operations: shapes and types are checked here, arithmetic is elsewhere.
#include <algorithm>
#include <limits>
#include <numeric>
#include <string_view>

#include "ffi/cpu/args.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/plan_check.h"
#include "ffi/cpu/tt_backward.h"
#include "ffi/cpu/tt_forward.h"
#include "ffi/cpu/tt_update.h"

namespace jax_tt {
namespace {

using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;

// What every handler but the plan's is told about the batch and the table.
struct TTCall {
  TTShape shape;
  Contraction contraction;
  int64_t hint = 0;
};

Status ReadCall(Span64 row_factors, Span64 col_factors, Span64 ranks, int64_t num_embeddings, int64_t hint,
                TTCall* call) {
  JAX_TT_RETURN_IF_ERROR(ReadShape(row_factors, col_factors, ranks, num_embeddings, &call->shape));
  call->contraction = ChooseContraction(call->shape, hint);
  call->hint = hint;
  return {};
}

// The d arguments from `first` on, as pointers to cores of this shape.
template <typename T, typename Pointer>
Status ReadCores(const TTShape& shape, const Args& args, size_t first, Pointer* cores) {
  for (int k = 0; k < shape.d; ++k) {
    auto buffer = args.get<ffi::AnyBuffer>(first + static_cast<size_t>(k));
    if (!buffer.has_value()) return InvalidArgument("a core is missing");
    JAX_TT_RETURN_IF_ERROR(Data(*buffer, "core", shape.core_size(k), &cores[k]));
  }
  return {};
}

template <typename T>
Status ReadProblem(const TTCall& call, const ffi::AnyBuffer& plan, const ffi::AnyBuffer& offsets,
                   const ffi::AnyBuffer& weights, int64_t positions, TTProblem<T>* problem) {
  problem->shape = call.shape;
  problem->contraction = call.contraction;
  if (positions < 0 || positions > std::numeric_limits<int32_t>::max())
    return InvalidArgument("positions must lie between 0 and 2^31 - 1");
  problem->layout = MakeLayout(call.shape, call.contraction, positions);
  if (Count(plan) < problem->layout.size()) return InvalidArgument("the plan is too small for this batch");
  JAX_TT_RETURN_IF_ERROR(Data(plan, "plan", -1, &problem->plan));
  JAX_TT_RETURN_IF_ERROR(Data(offsets, "offsets", -1, &problem->offsets));
  const int64_t per_group = offsets.dimensions().size() == 0 ? 0 : offsets.dimensions().back();
  if (per_group < 1) return InvalidArgument("offsets must hold at least the first offset of each group");
  problem->bags = per_group - 1;
  problem->groups = Count(offsets) / per_group;
  problem->capacity = problem->groups == 0 ? 0 : positions / problem->groups;
  if (problem->capacity * problem->groups != positions)
    return InvalidArgument("ids and offsets disagree on the number of groups");
  JAX_TT_RETURN_IF_ERROR(CheckOffsets(problem->offsets, problem->groups, problem->bags, problem->capacity));
  JAX_TT_RETURN_IF_ERROR(
      CheckPlan(call.shape, call.contraction, problem->layout, problem->groups * problem->bags, problem->plan));
  return OptionalData(weights, "weights", positions, &problem->weights);
}

template <typename T>
int64_t SavedSize(const TTCall& call, int64_t positions) {
  return sizeof(typename TTProblem<T>::C) == sizeof(float)
             ? positions * SavedPerPosition(call.shape, call.contraction, call.hint)
             : 0;
}

ffi::Error PlanImpl(ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer sentinel,
                    ffi::Result<ffi::AnyBuffer> plan, Span64 row_factors, Span64 col_factors, Span64 ranks,
                    int64_t num_embeddings, int64_t hint, bool split, bool padded, int64_t bounds,
                    std::string_view table) {
  return ToError(
      [&]() -> Status {
        TTCall call;
        Lookups lookups;
        int32_t* data = nullptr;
        JAX_TT_RETURN_IF_ERROR(CheckSentinel(sentinel, table));
        JAX_TT_RETURN_IF_ERROR(ReadCall(row_factors, col_factors, ranks, num_embeddings, hint, &call));
        JAX_TT_RETURN_IF_ERROR(ReadLookups(ids, offsets, split, call.shape.d, padded, bounds, table, &lookups));
        // A table without rows has no nearest row.
        if (call.shape.num_embeddings == 0 && lookups.bounds != Bounds::kError) lookups.bounds = Bounds::kZero;
        JAX_TT_RETURN_IF_ERROR(Data(*plan, "plan", -1, &data));
        if (Count(*plan) < MakeLayout(call.shape, call.contraction, lookups.size()).size())
          return InvalidArgument("the plan is too small for this batch");
        return BuildTTPlan(call.shape, call.contraction, lookups, data);
      }(),
      "tt_plan");
}

ffi::Error ForwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer plan, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       Args cores, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> saved,
                       Span64 row_factors, Span64 col_factors, Span64 ranks, int64_t num_embeddings, int64_t hint,
                       int64_t positions) {
  return ToError(
      [&]() -> Status {
        TTCall call;
        JAX_TT_RETURN_IF_ERROR(ReadCall(row_factors, col_factors, ranks, num_embeddings, hint, &call));
        auto first = cores.get<ffi::AnyBuffer>(0);
        if (!first.has_value()) return InvalidArgument("a core is missing");
        return DispatchStorage(first->element_type(), [&](auto tag) -> Status {
          using T = typename decltype(tag)::type;
          using C = typename TTProblem<T>::C;
          TTProblem<T> problem;
          C* out_data = nullptr;
          C* saved_data = nullptr;
          JAX_TT_RETURN_IF_ERROR(ReadCores<T>(call.shape, cores, 0, problem.cores));
          JAX_TT_RETURN_IF_ERROR(ReadProblem(call, plan, offsets, weights, positions, &problem));
          JAX_TT_RETURN_IF_ERROR(Data(*out, "out", problem.groups * problem.bags * call.shape.dim(), &out_data));
          JAX_TT_RETURN_IF_ERROR(OptionalData(*saved, "saved", SavedSize<T>(call, positions), &saved_data));
          return TTForward(problem, MakePool(threads), out_data, saved_data);
        });
      }(),
      "tt_forward");
}

ffi::Error BackwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer plan, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                        ffi::AnyBuffer saved, ffi::AnyBuffer out_gradient, Args cores,
                        ffi::Result<ffi::AnyBuffer> touched, ffi::Result<ffi::AnyBuffer> weight_gradient,
                        Rets gradients, Span64 row_factors, Span64 col_factors, Span64 ranks, int64_t num_embeddings,
                        int64_t hint, int64_t positions) {
  return ToError(
      [&]() -> Status {
        TTCall call;
        JAX_TT_RETURN_IF_ERROR(ReadCall(row_factors, col_factors, ranks, num_embeddings, hint, &call));
        auto first = cores.get<ffi::AnyBuffer>(0);
        if (!first.has_value()) return InvalidArgument("a core is missing");
        return DispatchStorage(first->element_type(), [&](auto tag) -> Status {
          using T = typename decltype(tag)::type;
          using C = typename TTProblem<T>::C;
          const TTShape& shape = call.shape;
          TTProblem<T> problem;
          CoreGradients<C> sink;
          const C* g = nullptr;
          const C* saved_data = nullptr;
          C* weight_data = nullptr;
          int32_t* touched_data = nullptr;
          JAX_TT_RETURN_IF_ERROR(ReadCores<T>(shape, cores, 0, problem.cores));
          JAX_TT_RETURN_IF_ERROR(ReadProblem(call, plan, offsets, weights, positions, &problem));
          JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", problem.groups * problem.bags * shape.dim(), &g));
          JAX_TT_RETURN_IF_ERROR(OptionalData(saved, "saved", SavedSize<T>(call, positions), &saved_data));
          JAX_TT_RETURN_IF_ERROR(OptionalData(*weight_gradient, "weight gradient", positions, &weight_data));
          const int64_t slices = std::accumulate(shape.p, shape.p + shape.d, int64_t{0});
          JAX_TT_RETURN_IF_ERROR(Data(*touched, "touched", slices, &touched_data));
          for (int k = 0; k < shape.d; touched_data += shape.p[k++]) {
            auto buffer = gradients.get<ffi::AnyBuffer>(static_cast<size_t>(k));
            if (!buffer.has_value()) return InvalidArgument("a core gradient is missing");
            JAX_TT_RETURN_IF_ERROR(Data(**buffer, "core gradient", shape.core_size(k), &sink.gradient[k]));
            sink.touched[k] = touched_data;
          }
          const Pool pool = MakePool(threads);
          JAX_TT_RETURN_IF_ERROR(TTBackward(problem, pool, g, saved_data, sink, weight_data));
          ClearUntouched(shape, pool, sink);
          return {};
        });
      }(),
      "tt_backward");
}

// Cores and slots that an update changes in place: the results from `first` on must be the arguments themselves.
template <typename T>
Status ReadTables(const TTShape& shape, const OptimizerTraits& traits, const Args& args, size_t first, const Rets& rets,
                  CoreTables<T>* tables) {
  const auto aliased = [&](size_t index, int64_t count, std::string_view name, auto** data) -> Status {
    auto in = args.get<ffi::AnyBuffer>(first + index);
    auto out = rets.get<ffi::AnyBuffer>(index);
    if (!in.has_value() || !out.has_value()) return InvalidArgument(std::string(name) + " is missing");
    return UpdatedInPlace(*in, **out, name, count, data);
  };
  for (int k = 0; k < shape.d; ++k) {
    RowTable<T>& table = tables->table[k];
    table.width = shape.slice_size(k);
    table.stream = static_cast<uint64_t>(k);
    JAX_TT_RETURN_IF_ERROR(aliased(static_cast<size_t>(k), shape.core_size(k), "core", &table.values));
    for (int s = 0; s < traits.slots(); ++s)
      JAX_TT_RETURN_IF_ERROR(aliased(static_cast<size_t>(shape.d + k * traits.slots() + s),
                                     traits.row_wise ? shape.p[k] : shape.core_size(k), "slot", &table.slots[s]));
  }
  return {};
}

ffi::Error UpdateImpl(ffi::ThreadPool threads, ffi::AnyBuffer /*forward_out*/, ffi::AnyBuffer plan,
                      ffi::AnyBuffer offsets, ffi::AnyBuffer weights, ffi::AnyBuffer saved, ffi::AnyBuffer out_gradient,
                      ffi::AnyBuffer hyper, ffi::AnyBuffer scale, ffi::AnyBuffer seed, Args tables,
                      ffi::Result<ffi::AnyBuffer> applied, ffi::Result<ffi::AnyBuffer> weight_gradient, Rets results,
                      Span64 row_factors, Span64 col_factors, Span64 ranks, int64_t num_embeddings, int64_t hint,
                      int64_t positions, int64_t optimizer, bool skip_nonfinite, bool stochastic_rounding) {
  return ToError(
      [&]() -> Status {
        TTCall call;
        OptimizerStep step;
        JAX_TT_RETURN_IF_ERROR(ReadCall(row_factors, col_factors, ranks, num_embeddings, hint, &call));
        JAX_TT_RETURN_IF_ERROR(ReadStep(optimizer, hyper, scale, seed, skip_nonfinite, stochastic_rounding, &step));
        auto first = tables.get<ffi::AnyBuffer>(0);
        if (!first.has_value()) return InvalidArgument("a core is missing");
        return DispatchStorage(first->element_type(), [&](auto tag) -> Status {
          using T = typename decltype(tag)::type;
          using C = typename TTProblem<T>::C;
          TTProblem<T> problem;
          CoreTables<T> in_place;
          const C* g = nullptr;
          const C* saved_data = nullptr;
          C* weight_data = nullptr;
          float* applied_data = nullptr;
          JAX_TT_RETURN_IF_ERROR(ReadCores<T>(call.shape, tables, 0, problem.cores));
          JAX_TT_RETURN_IF_ERROR(ReadProblem(call, plan, offsets, weights, positions, &problem));
          JAX_TT_RETURN_IF_ERROR(
              Data(out_gradient, "out gradient", problem.groups * problem.bags * call.shape.dim(), &g));
          JAX_TT_RETURN_IF_ERROR(OptionalData(saved, "saved", SavedSize<T>(call, positions), &saved_data));
          JAX_TT_RETURN_IF_ERROR(OptionalData(*weight_gradient, "weight gradient", positions, &weight_data));
          JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
          JAX_TT_RETURN_IF_ERROR(ReadTables(call.shape, step.traits(), tables, 0, results, &in_place));
          return TTUpdate(problem, MakePool(threads), in_place, g, saved_data, step, weight_data, applied_data);
        });
      }(),
      "tt_update");
}

ffi::Error ApplyImpl(ffi::ThreadPool threads, ffi::AnyBuffer touched, ffi::AnyBuffer hyper, ffi::AnyBuffer scale,
                     ffi::AnyBuffer seed, Args args, ffi::Result<ffi::AnyBuffer> applied, Rets results,
                     Span64 row_factors, Span64 col_factors, Span64 ranks, int64_t optimizer, bool skip_nonfinite,
                     bool stochastic_rounding) {
  return ToError(
      [&]() -> Status {
        TTShape shape;
        OptimizerStep step;
        JAX_TT_RETURN_IF_ERROR(ReadShape(row_factors, col_factors, ranks, 0, &shape));
        JAX_TT_RETURN_IF_ERROR(ReadStep(optimizer, hyper, scale, seed, skip_nonfinite, stochastic_rounding, &step));
        auto first = args.get<ffi::AnyBuffer>(static_cast<size_t>(shape.d));
        if (!first.has_value()) return InvalidArgument("a core is missing");
        return DispatchStorage(first->element_type(), [&](auto tag) -> Status {
          using T = typename decltype(tag)::type;
          using C = typename ComputeType<T>::type;
          CoreGradients<C> gradients;
          CoreTables<T> in_place;
          int32_t* touched_data = nullptr;
          float* applied_data = nullptr;
          const int64_t slices = std::accumulate(shape.p, shape.p + shape.d, int64_t{0});
          JAX_TT_RETURN_IF_ERROR(Data(touched, "touched", slices, &touched_data));
          JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
          JAX_TT_RETURN_IF_ERROR(ReadCores<C>(shape, args, 0, gradients.gradient));
          for (int k = 0; k < shape.d; touched_data += shape.p[k++]) gradients.touched[k] = touched_data;
          JAX_TT_RETURN_IF_ERROR(
              ReadTables(shape, step.traits(), args, static_cast<size_t>(shape.d), results, &in_place));
          return TTApply(shape, MakePool(threads), in_place, gradients, step, applied_data);
        });
      }(),
      "tt_apply");
}

}  // namespace

#define JAX_TT_TABLE_ATTRS .Attr<Span64>("row_factors").Attr<Span64>("col_factors").Attr<Span64>("ranks")
#define JAX_TT_BATCH_ATTRS JAX_TT_TABLE_ATTRS.Attr<int64_t>("num_embeddings").Attr<int64_t>("hint")

// d = number of cores, n = ids, G = groups, B = bags of a group, D = columns.
XLA_FFI_DEFINE_HANDLER_SYMBOL(TTPlanCpu, PlanImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G], split: [G.., n / G, d]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 []
                                  .Ret<ffi::AnyBuffer>()  // plan s32 [PlanLayout::size() or more]
                              JAX_TT_BATCH_ATTRS.Attr<bool>("split")
                                  .Attr<bool>("padded")
                                  .Attr<int64_t>("bounds")
                                  .Attr<std::string_view>("table"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // plan
                                  .Arg<ffi::AnyBuffer>()  // offsets
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .RemainingArgs()        // cores
                                  .Ret<ffi::AnyBuffer>()  // out [G.., B, D]
                                  .Ret<ffi::AnyBuffer>()  // saved [n, elements], or empty
                              JAX_TT_BATCH_ATTRS.Attr<int64_t>("positions"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTBackwardCpu, BackwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // plan
                                  .Arg<ffi::AnyBuffer>()  // offsets
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // saved, or empty
                                  .Arg<ffi::AnyBuffer>()  // out gradient [G.., B, D]
                                  .RemainingArgs()        // cores
                                  .Ret<ffi::AnyBuffer>()  // touched s32 [sum of row factors]
                                  .Ret<ffi::AnyBuffer>()  // weight gradient [n], or empty
                                  .RemainingRets()        // core gradients
                              JAX_TT_BATCH_ATTRS.Attr<int64_t>("positions"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTUpdateCpu, UpdateImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // result of the forward pass: only to run after it
                                  .Arg<ffi::AnyBuffer>()  // plan
                                  .Arg<ffi::AnyBuffer>()  // offsets
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // saved, or empty
                                  .Arg<ffi::AnyBuffer>()  // out gradient [G.., B, D]
                                  .Arg<ffi::AnyBuffer>()  // hyper-parameters f32
                                  .Arg<ffi::AnyBuffer>()  // gradient scale f32 []
                                  .Arg<ffi::AnyBuffer>()  // seed u32 [2]
                                  .RemainingArgs()        // cores, then slots core by core
                                  .Ret<ffi::AnyBuffer>()  // applied f32 []
                                  .Ret<ffi::AnyBuffer>()  // weight gradient [n], or empty
                                  .RemainingRets()        // cores and slots, in place
                              JAX_TT_BATCH_ATTRS.Attr<int64_t>("positions")
                                  .Attr<int64_t>("optimizer")
                                  .Attr<bool>("skip_nonfinite")
                                  .Attr<bool>("stochastic_rounding"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTApplyCpu, ApplyImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // touched s32 [sum of row factors]
                                  .Arg<ffi::AnyBuffer>()  // hyper-parameters f32
                                  .Arg<ffi::AnyBuffer>()  // gradient scale f32 []
                                  .Arg<ffi::AnyBuffer>()  // seed u32 [2]
                                  .RemainingArgs()        // core gradients, cores, then slots core by core
                                  .Ret<ffi::AnyBuffer>()  // applied f32 []
                                  .RemainingRets()        // cores and slots, in place
                              JAX_TT_TABLE_ATTRS.Attr<int64_t>("optimizer")
                                  .Attr<bool>("skip_nonfinite")
                                  .Attr<bool>("stochastic_rounding"));

}  // namespace jax_tt
