// FFI handlers of dense tables.
#include <memory>
#include <string_view>
#include <vector>

#include "ffi/common/dense_tables.h"
#include "ffi/common/packed_table.h"
#include "ffi/core/packed_rows.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/dense/dense.h"
#include "ffi/cpu/handlers.h"

namespace jax_tt {
namespace {

template <typename T>
Status ReadProblem(const ffi::Dictionary& attrs, const BatchArgs& batch, const ffi::AnyBuffer& table,
                   DenseProblem<T>* problem) {
  JAX_TT_RETURN_IF_ERROR(ReadDenseCall(attrs, batch, table, &problem->lookups, problem));
  if constexpr (kPackedBits<T> == 0) {
    return Data(table, "table", -1, &problem->table);
  } else {
    const void* rows = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadPackedRows(attrs, table, kPackedBits<T>, &rows, &problem->dim, &problem->levels));
    problem->table = static_cast<const T*>(rows);
    return {};
  }
}

// Calls body(TypeTag<T>) with the storage type of the rows of a table that is only read, which may be quantized.
template <typename F>
Status DispatchRows(const TableArgs& args, F&& body) {
  int64_t bits = 0;
  JAX_TT_RETURN_IF_ERROR(ReadBits(args.attrs, &bits));
  switch (bits) {
    case 8:
      return body(TypeTag<Packed<8>>{});
    case 4:
      return body(TypeTag<Packed<4>>{});
    case 3:
      return body(TypeTag<Packed<3>>{});
    case 2:
      return body(TypeTag<Packed<2>>{});
    default:
      return DispatchStorage(args.table.element_type(), body);
  }
}

template <typename T, typename Element>
Status ReadVectors(const TableArgs& args, const ffi::AnyBuffer& buffer, std::string_view name, DenseProblem<T>* problem,
                   Element** data) {
  const int64_t bags = problem->lookups.groups * problem->lookups.bags;
  return ReadVectors(args.columns, buffer, name, bags, problem->dim, &problem->vectors, data);
}

using PassPtr = std::unique_ptr<Pass>;

Status ReadForward(const TableArgs& args, const ForwardArgs& own, PassPtr* pass) {
  return DispatchRows(args, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    DenseProblem<T> problem;
    typename DenseProblem<T>::C* out_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadProblem(args.attrs, args.batch, args.table, &problem));
    JAX_TT_RETURN_IF_ERROR(CheckSentinel(own.sentinel, problem.lookups.table));
    JAX_TT_RETURN_IF_ERROR(ReadVectors(args, own.out, "out", &problem, &out_data));
    *pass = DenseForward(problem, out_data);
    return {};
  });
}

Status ReadBackward(const TableArgs& args, const BackwardArgs& own, PassPtr* pass) {
  return DispatchStorage(args.table.element_type(), [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    using C = typename DenseProblem<T>::C;
    DenseProblem<T> problem;
    const C* g = nullptr;
    C* gradient_data = nullptr;
    C* weight_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadProblem(args.attrs, args.batch, args.table, &problem));
    JAX_TT_RETURN_IF_ERROR(ReadVectors(args, own.out_gradient, "out gradient", &problem, &g));
    JAX_TT_RETURN_IF_ERROR(OptionalData(own.weight_gradient, "weight gradient", problem.lookups.size(), &weight_data));
    JAX_TT_RETURN_IF_ERROR(Data(own.gradient, "table gradient", Count(args.table), &gradient_data));
    PreferHugePages({own.gradient});
    *pass = DenseBackward(problem, g, gradient_data, weight_data);
    return {};
  });
}

Status ReadUpdate(const TableArgs& args, const UpdateArgs& own, PassPtr* pass) {
  return DispatchStorage(args.table.element_type(), [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    using C = typename DenseProblem<T>::C;
    DenseProblem<T> problem;
    RowTable<T> rows;
    OptimizerStep<C> step;
    const C* g = nullptr;
    C* weight_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadProblem(args.attrs, args.batch, args.table, &problem));
    JAX_TT_RETURN_IF_ERROR(ReadVectors(args, own.out_gradient, "out gradient", &problem, &g));
    JAX_TT_RETURN_IF_ERROR(OptionalData(own.weight_gradient, "weight gradient", problem.lookups.size(), &weight_data));
    JAX_TT_RETURN_IF_ERROR(ReadStep(own.step, &step));
    rows.width = problem.dim;
    JAX_TT_RETURN_IF_ERROR(ReadDenseTable(step.traits, args.table, own.new_table, own.slots, &rows));
    *pass = DenseUpdate(problem, rows, g, step, weight_data, own.applied);
    return {};
  });
}

// Runs the passes that `read` appends.
template <typename Read>
ffi::Error Run(OpThreads threads, const char* op, Read read) {
  std::vector<PassPtr> passes;
  Status status = read(&passes);
  if (status.ok()) status = RunPasses(passes, MakePool(threads));
  return ToError(status, op);
}

ffi::Error ForwardImpl(OpThreads threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer sentinel, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Dictionary attrs) {
  return Run(threads, "embed_bag", [&](std::vector<PassPtr>* passes) {
    PreferHugePages({*out});
    return ReadForward({attrs, {ids, offsets, weights}, table}, {sentinel, *out}, &passes->emplace_back());
  });
}

ffi::Error BackwardImpl(OpThreads threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                        ffi::AnyBuffer out_gradient, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> weight_gradient,
                        ffi::Result<ffi::AnyBuffer> gradient, ffi::Dictionary attrs) {
  return Run(threads, "embed_bag_backward", [&](std::vector<PassPtr>* passes) {
    return ReadBackward({attrs, {ids, offsets, weights}, table}, {out_gradient, *weight_gradient, *gradient},
                        &passes->emplace_back());
  });
}

ffi::Error UpdateImpl(OpThreads threads, ffi::AnyBuffer /*forward_out*/, ffi::AnyBuffer ids, ffi::AnyBuffer offsets,
                      ffi::AnyBuffer weights, ffi::AnyBuffer out_gradient, ffi::AnyBuffer hyper, ffi::AnyBuffer scale,
                      ffi::AnyBuffer seed, ffi::AnyBuffer table, ffi::RemainingArgs slots,
                      ffi::Result<ffi::AnyBuffer> applied, ffi::Result<ffi::AnyBuffer> weight_gradient,
                      ffi::Result<ffi::AnyBuffer> new_table, ffi::RemainingRets new_slots, ffi::Dictionary attrs) {
  return Run(threads, "embed_bag_update", [&](std::vector<PassPtr>* passes) -> Status {
    SlotBuffers all;
    StepArgs step;
    float* applied_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadSlots(attrs, slots, new_slots, &all));
    JAX_TT_RETURN_IF_ERROR(ReadStepArgs(attrs, hyper, scale, seed, &step));
    JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
    return ReadUpdate({attrs, {ids, offsets, weights}, table},
                      {step, all, applied_data, out_gradient, *weight_gradient, *new_table}, &passes->emplace_back());
  });
}

// The call of a target on many tables.
TablesCall CallOf(const Args& args, const Rets& rets, const ffi::Dictionary& attrs) {
  return {args, rets, attrs, rets.size()};
}

ffi::Error TablesForwardImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run(threads, "lookup_features", [&](std::vector<PassPtr>* passes) {
    return ReadForwardTables(CallOf(args, rets, attrs), [&](const TableArgs& table, const ForwardArgs& own) {
      // With columns, the tables have one result.
      if (table.columns.size() == 0 || passes->empty()) PreferHugePages({own.out});
      return ReadForward(table, own, &passes->emplace_back());
    });
  });
}

ffi::Error TablesBackwardImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run(threads, "lookup_features_backward", [&](std::vector<PassPtr>* passes) {
    return ReadBackwardTables(CallOf(args, rets, attrs), [&](const TableArgs& table, const BackwardArgs& own) {
      return ReadBackward(table, own, &passes->emplace_back());
    });
  });
}

ffi::Error TablesUpdateImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run(threads, "lookup_features_update", [&](std::vector<PassPtr>* passes) {
    return ReadUpdateTables(CallOf(args, rets, attrs), [&](const TableArgs& table, const UpdateArgs& own) {
      return ReadUpdate(table, own, &passes->emplace_back());
    });
  });
}

}  // namespace

// n = ids, G = groups, B = bags of a group, N x D = the table.  The rows of a quantized table, with the attributes bits
// and dim, have W bytes; they have no backward pass and no update.
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 []
                                  .Arg<ffi::AnyBuffer>()  // table [N, D], or packed rows u8 [N, W] or f32 [N, W / 4]
                                  .Ret<ffi::AnyBuffer>()  // out [G.., B, D]
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseBackwardCpu, BackwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // out gradient [G.., B, D]
                                  .Arg<ffi::AnyBuffer>()  // table [N, D]
                                  .Ret<ffi::AnyBuffer>()  // weight gradient [n], or empty
                                  .Ret<ffi::AnyBuffer>()  // table gradient [N, D]
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseUpdateCpu, UpdateImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // result of the forward pass: orders the update after it
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // out gradient [G.., B, D]
                                  .Arg<ffi::AnyBuffer>()  // hyper-parameters f32, or f64 for an f64 table
                                  .Arg<ffi::AnyBuffer>()  // gradient scale [2] of that type
                                  .Arg<ffi::AnyBuffer>()  // seed u32 [2]
                                  .Arg<ffi::AnyBuffer>()  // table [N, D]
                                  .RemainingArgs()        // slots
                                  .Ret<ffi::AnyBuffer>()  // applied f32 []
                                  .Ret<ffi::AnyBuffer>()  // weight gradient [n], or empty
                                  .Ret<ffi::AnyBuffer>()  // table, in place
                                  .RemainingRets()        // slots, in place
                                  .Attrs());

// The same of many tables, as ffi/common/dense_tables.h describes them.
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesForwardCpu, TablesForwardImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesBackwardCpu, TablesBackwardImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesUpdateCpu, TablesUpdateImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

}  // namespace jax_tt
