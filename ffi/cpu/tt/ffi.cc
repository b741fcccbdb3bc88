// FFI handlers of the TT operations, which check shapes and types.
#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "ffi/common/tt_tables.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/ids.h"
#include "ffi/cpu/tables/ops.h"
#include "ffi/cpu/tt/args.h"
#include "ffi/cpu/tt/backward.h"
#include "ffi/cpu/tt/forward.h"
#include "ffi/cpu/tt/update.h"
#include "ffi/cpu/tt_plan/check.h"
#include "ffi/cpu/tt_plan/plan.h"

namespace jax_tt {
namespace {

// The problem of one table, its arrays, and the memory that its plan may need.
template <typename T>
struct TTCall {
  using C = typename TTProblem<T>::C;

  TTProblem<T> problem;
  Lookups lookups;
  int64_t saved_size = 0;  // elements of the saved products, if any
  const C* out_gradient = nullptr;
  const C* saved = nullptr;  // of the plan
  C* weight_gradient = nullptr;

  Status Read(const TTTableArgs& given) {
    problem.shape = given.shape;
    return ReadTTProblem(given.attrs, given.batch, given.args, given.first_core, &lookups, &problem, &saved_size);
  }
  Status ReadGradient(const TTTableArgs& given, const TTGradientArgs& own) {
    JAX_TT_RETURN_IF_ERROR(Read(given));
    JAX_TT_RETURN_IF_ERROR(Data(own.out_gradient, "out gradient", problem.out_size(), &out_gradient));
    JAX_TT_RETURN_IF_ERROR(OptionalData(own.saved, "saved", saved_size, &saved));
    return OptionalData(own.weight_gradient, "weight gradient", problem.layout.n, &weight_gradient);
  }
  // Takes the plan of an op before, or makes one if that is not a plan of this batch.
  Status TakePlan(const ffi::AnyBuffer& plan, const Pool& pool) {
    JAX_TT_RETURN_IF_ERROR(CheckOffsets(lookups.offsets, lookups.groups, lookups.bags, lookups.capacity));
    JAX_TT_RETURN_IF_ERROR(Data(plan, "plan", -1, &problem.plan));
    if (Count(plan) >= problem.layout.size() && IsPlanOf(problem.layout, lookups, problem.plan))
      return CheckPlan(problem.shape, problem.contraction, problem.layout, problem.groups * problem.bags, problem.plan);
    saved = nullptr;
    return MakeOwnPlan(pool);
  }
  // Makes the plan, in `plan` or, if that is empty, in memory of this op.
  Status MakePlan(const ffi::AnyBuffer& plan, const Pool& pool) {
    int32_t* made = nullptr;
    JAX_TT_RETURN_IF_ERROR(Data(plan, "plan", -1, &made));
    if (Count(plan) == 0) return MakeOwnPlan(pool);
    if (Count(plan) < problem.layout.size()) return InvalidArgument("the plan is too small for this batch");
    problem.plan = made;
    return BuildTTPlan(problem.shape, problem.contraction, lookups, pool, made);
  }
  // The op on this table, which it owns; plan and run take a call and a pool.
  template <typename Plan, typename Run>
  static TableOp Op(std::shared_ptr<TTCall> call, Plan plan, Run run) {
    const TTProblem<T>& problem = call->problem;
    const double work = ContractionCost(problem.shape, problem.contraction, problem.layout.n);
    return {call->lookups.table, work, [call, plan](const Pool& pool) { return plan(*call, pool); },
            [call, run](const Pool& pool) { return run(*call, pool); }};
  }

 private:
  Status MakeOwnPlan(const Pool& pool) {
    int32_t* made = nullptr;
    own_plan_.Request(&made, problem.layout.size());
    JAX_TT_RETURN_IF_ERROR(own_plan_.Allocate());
    problem.plan = made;
    return BuildTTPlan(problem.shape, problem.contraction, lookups, pool, made);
  }

  Workspace own_plan_;
};

// plan(call, pool) sets the plan of the call.
template <typename Plan>
Status ReadForward(const TTTableArgs& given, const ffi::AnyBuffer& out, const ffi::AnyBuffer& saved, Plan plan,
                   TableOp* op) {
  return DispatchCores(given.args, given.first_core, [&](auto tag) -> Status {
    using Call = TTCall<typename decltype(tag)::type>;
    const auto call = std::make_shared<Call>();
    typename Call::C *out_data = nullptr, *saved_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(call->Read(given));
    JAX_TT_RETURN_IF_ERROR(Data(out, "out", call->problem.out_size(), &out_data));
    JAX_TT_RETURN_IF_ERROR(OptionalData(saved, "saved", call->saved_size, &saved_data));
    PreferHugePages({out, saved});
    *op = Call::Op(call, plan, [out_data, saved_data](const Call& own, const Pool& pool) {
      return TTForward(own.problem, pool, /*add=*/false, out_data, saved_data);
    });
    return {};
  });
}

// The plan of backward passes and updates.
auto Taking(const ffi::AnyBuffer& plan) {
  return [plan](auto& call, const Pool& pool) { return call.TakePlan(plan, pool); };
}

Status ReadBackward(const TTTableArgs& given, const ffi::AnyBuffer& touched, const TTGradientArgs& gradient,
                    TableOp* op) {
  return DispatchCores(given.args, given.first_core, [&](auto tag) -> Status {
    using Call = TTCall<typename decltype(tag)::type>;
    const auto call = std::make_shared<Call>();
    CoreGradients<typename Call::C> sink;
    int32_t* touched_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(call->ReadGradient(given, gradient));
    const TTShape& shape = call->problem.shape;
    const int64_t slices = std::accumulate(shape.p, shape.p + shape.d, int64_t{0});
    JAX_TT_RETURN_IF_ERROR(Data(touched, "touched", slices, &touched_data));
    for (int k = 0; k < shape.d; touched_data += shape.p[k++]) {
      auto buffer = gradient.rets.get<ffi::AnyBuffer>(gradient.first_result + static_cast<size_t>(k));
      if (!buffer.has_value()) return InvalidArgument("a core gradient is missing");
      JAX_TT_RETURN_IF_ERROR(Data(**buffer, "core gradient", shape.core_size(k), &sink.gradient[k]));
      sink.touched[k] = touched_data;
    }
    *op = Call::Op(call, Taking(gradient.plan), [sink](const Call& own, const Pool& pool) -> Status {
      JAX_TT_RETURN_IF_ERROR(TTBackward(own.problem, pool, own.out_gradient, own.saved, sink, own.weight_gradient));
      ClearUntouched(own.problem.shape, pool, sink);
      return {};
    });
    return {};
  });
}

Status ReadUpdate(const TTTableArgs& given, const TTGradientArgs& gradient, const StepArgs& step_args, float* applied,
                  TableOp* op) {
  return DispatchCores(given.args, given.first_core, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    const auto call = std::make_shared<TTCall<T>>();
    CoreTables<T> in_place;
    OptimizerStep<typename ComputeType<T>::type> step;
    JAX_TT_RETURN_IF_ERROR(call->ReadGradient(given, gradient));
    JAX_TT_RETURN_IF_ERROR(ReadStep(step_args, &step));
    JAX_TT_RETURN_IF_ERROR(ReadTables(call->problem.shape, step.traits, given.args, given.first_core, gradient.rets,
                                      gradient.first_result, in_place.table));
    *op = TTCall<T>::Op(call, Taking(gradient.plan), [in_place, step, applied](const TTCall<T>& own, const Pool& pool) {
      return TTUpdate(own.problem, pool, in_place, own.out_gradient, own.saved, step, own.weight_gradient, applied);
    });
    return {};
  });
}

Status ReadApply(const TTApplyArgs& given, const StepArgs& step_args, float* applied, TableOp* op) {
  return DispatchCores(given.args, given.first_core, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    using C = typename ComputeType<T>::type;
    const TTShape& shape = given.shape;
    CoreGradients<C> gradients;
    CoreTables<T> in_place;
    OptimizerStep<C> step;
    int32_t* touched = nullptr;
    const int64_t slices = std::accumulate(shape.p, shape.p + shape.d, int64_t{0});
    double elements = 0;
    JAX_TT_RETURN_IF_ERROR(ReadStep(step_args, &step));
    JAX_TT_RETURN_IF_ERROR(Data(given.touched, "touched", slices, &touched));
    JAX_TT_RETURN_IF_ERROR(ReadCores<C>(shape, given.args, given.first_gradient, gradients.gradient));
    JAX_TT_RETURN_IF_ERROR(
        ReadTables(shape, step.traits, given.args, given.first_core, given.rets, given.first_result, in_place.table));
    for (int k = 0; k < shape.d; touched += shape.p[k++]) {
      gradients.touched[k] = touched;
      elements += static_cast<double>(shape.core_size(k));
    }
    *op = {given.table, elements, [](const Pool&) { return Status(); },
           [=](const Pool& pool) { return TTApply(shape, pool, in_place, gradients, step, applied); }};
    return {};
  });
}

// Runs the ops that `read` appends.
template <typename Read>
ffi::Error Run(OpThreads threads, Changes changes, const ffi::Dictionary& attrs, Read read) {
  std::vector<TableOp> ops;
  Status status = read(&ops);
  if (status.ok()) status = RunTableOps(std::move(ops), changes, MakePool(threads));
  return ToError(status, attrs);
}

ffi::Error PlanImpl(OpThreads threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer sentinel,
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
      attrs);
}

ffi::Error ForwardImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run(threads, Changes::kNothing, attrs, [&](std::vector<TableOp>* ops) -> Status {
    return ReadTTForwardTables(
        {args, rets, attrs, rets.size()}, [ops](const TTTableArgs& given, const TTForwardArgs& own) -> Status {
          PreferHugePages({own.plan});
          const auto plan = [plan = own.plan, sentinel = own.sentinel](auto& table, const Pool& pool) -> Status {
            JAX_TT_RETURN_IF_ERROR(CheckSentinel(sentinel, table.lookups.table));
            return table.MakePlan(plan, pool);
          };
          return ReadForward(given, own.out, own.saved, plan, &ops->emplace_back());
        });
  });
}

ffi::Error BackwardImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run(threads, Changes::kNothing, attrs, [&](std::vector<TableOp>* ops) -> Status {
    return ReadTTBackwardTables(
        {args, rets, attrs, rets.size()},
        [ops](const TTTableArgs& given, const ffi::AnyBuffer& touched, const TTGradientArgs& gradient) {
          return ReadBackward(given, touched, gradient, &ops->emplace_back());
        });
  });
}

ffi::Error UpdateImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run(threads, Changes::kTables, attrs, [&](std::vector<TableOp>* ops) -> Status {
    return ReadTTUpdateTables(
        {args, rets, attrs, rets.size()},
        [ops](const TTTableArgs& given, const TTGradientArgs& gradient, const StepArgs& step, float* applied) {
          return ReadUpdate(given, gradient, step, applied, &ops->emplace_back());
        });
  });
}

ffi::Error ApplyImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run(threads, Changes::kTables, attrs, [&](std::vector<TableOp>* ops) -> Status {
    return ReadTTApplyTables({args, rets, attrs, rets.size()},
                             [ops](const TTApplyArgs& given, const StepArgs& step, float* applied) {
                               return ReadApply(given, step, applied, &ops->emplace_back());
                             });
  });
}

}  // namespace

// n = ids, G = groups, B = bags of a group, d = number of cores.
XLA_FFI_DEFINE_HANDLER_SYMBOL(TTPlanCpu, PlanImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G], split: [G.., n / G, d]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 []
                                  .Ret<ffi::AnyBuffer>()  // plan s32 [PlanLayout::size() or more]
                                  .Attrs());

// ffi/common/tt_tables.h describes the arguments and results of the others.
XLA_FFI_DEFINE_HANDLER_SYMBOL(TTForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTBackwardCpu, BackwardImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTUpdateCpu, UpdateImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(TTApplyCpu, ApplyImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

}  // namespace jax_tt
