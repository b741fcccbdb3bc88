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
ffi::Error Run(OpThreads threads, const ffi::Dictionary& attrs, Read read) {
  std::vector<PassPtr> passes;
  KeptOffsets offsets;
  Status status = read(&passes, &offsets);
  if (status.ok()) status = RunPasses(passes, MakePool(threads));
  return ToError(status, attrs);
}

ffi::Error ForwardImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run(threads, attrs, [&](std::vector<PassPtr>* passes, KeptOffsets* offsets) {
    return ReadForwardTables({args, rets, attrs, rets.size(), offsets},
                             [&](const TableArgs& table, const ForwardArgs& own) {
                               // With columns, the tables have one result.
                               if (table.columns.size() == 0 || passes->empty()) PreferHugePages({own.out});
                               return ReadForward(table, own, &passes->emplace_back());
                             });
  });
}

ffi::Error BackwardImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run(threads, attrs, [&](std::vector<PassPtr>* passes, KeptOffsets* offsets) {
    return ReadBackwardTables({args, rets, attrs, rets.size(), offsets},
                              [&](const TableArgs& table, const BackwardArgs& own) {
                                return ReadBackward(table, own, &passes->emplace_back());
                              });
  });
}

ffi::Error UpdateImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run(threads, attrs, [&](std::vector<PassPtr>* passes, KeptOffsets* offsets) {
    return ReadUpdateTables(
        {args, rets, attrs, rets.size(), offsets},
        [&](const TableArgs& table, const UpdateArgs& own) { return ReadUpdate(table, own, &passes->emplace_back()); });
  });
}

}  // namespace

// ffi/common/dense_tables.h describes the arguments and results.
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseBackwardCpu, BackwardImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseUpdateCpu, UpdateImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

}  // namespace jax_tt
