// FFI handlers of dense tables.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/common/call_args.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/dense.h"
#include "ffi/cpu/handlers.h"

namespace jax_tt {
namespace {

template <typename T>
Status ReadProblem(const ffi::Dictionary& attrs, const BatchArgs& batch, const ffi::AnyBuffer& table,
                   DenseProblem<T>* problem) {
  JAX_TT_RETURN_IF_ERROR(ReadDenseCall(attrs, batch, table, &problem->lookups, problem));
  return Data(table, "table", -1, &problem->table);
}

template <typename T>
int64_t OutCount(const DenseProblem<T>& problem) {
  return problem.lookups.groups * problem.lookups.bags * problem.dim;
}

// The arguments of the passes over one table.
struct TableArgs {
  ffi::Dictionary attrs;
  BatchArgs batch;
  const ffi::AnyBuffer& table;
};

using PassPtr = std::unique_ptr<Pass>;

Status ReadForward(const TableArgs& args, const ffi::AnyBuffer& sentinel, const ffi::AnyBuffer& out, PassPtr* pass) {
  return DispatchStorage(args.table.element_type(), [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    DenseProblem<T> problem;
    typename DenseProblem<T>::C* out_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadProblem(args.attrs, args.batch, args.table, &problem));
    JAX_TT_RETURN_IF_ERROR(CheckSentinel(sentinel, problem.lookups.table));
    JAX_TT_RETURN_IF_ERROR(Data(out, "out", OutCount(problem), &out_data));
    *pass = DenseForward(problem, out_data);
    return {};
  });
}

Status ReadBackward(const TableArgs& args, const ffi::AnyBuffer& out_gradient, const ffi::AnyBuffer& weight_gradient,
                    const ffi::AnyBuffer& gradient, PassPtr* pass) {
  return DispatchStorage(args.table.element_type(), [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    using C = typename DenseProblem<T>::C;
    DenseProblem<T> problem;
    const C* g = nullptr;
    C* gradient_data = nullptr;
    C* weight_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadProblem(args.attrs, args.batch, args.table, &problem));
    JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", OutCount(problem), &g));
    JAX_TT_RETURN_IF_ERROR(OptionalData(weight_gradient, "weight gradient", problem.lookups.size(), &weight_data));
    JAX_TT_RETURN_IF_ERROR(Data(gradient, "table gradient", Count(args.table), &gradient_data));
    *pass = DenseBackward(problem, g, gradient_data, weight_data);
    return {};
  });
}

struct StepBuffers {
  const ffi::AnyBuffer &hyper, &scale, &seed;
};

Status ReadUpdate(const TableArgs& args, const ffi::AnyBuffer& out_gradient, const StepBuffers& step_args,
                  const SlotBuffers& slots, const ffi::AnyBuffer& applied, const ffi::AnyBuffer& weight_gradient,
                  const ffi::AnyBuffer& new_table, PassPtr* pass) {
  return DispatchStorage(args.table.element_type(), [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    using C = typename DenseProblem<T>::C;
    DenseProblem<T> problem;
    OptimizerStep step;
    RowTable<T> rows;
    const C* g = nullptr;
    C* weight_data = nullptr;
    float* applied_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadStep(args.attrs, step_args.hyper, step_args.scale, step_args.seed, &step));
    JAX_TT_RETURN_IF_ERROR(ReadProblem(args.attrs, args.batch, args.table, &problem));
    JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", OutCount(problem), &g));
    JAX_TT_RETURN_IF_ERROR(OptionalData(weight_gradient, "weight gradient", problem.lookups.size(), &weight_data));
    JAX_TT_RETURN_IF_ERROR(Data(applied, "applied", 1, &applied_data));
    rows.width = problem.dim;
    JAX_TT_RETURN_IF_ERROR(ReadDenseTable(step.traits(), args.table, new_table, slots, &rows));
    *pass = DenseUpdate(problem, rows, g, step, weight_data, applied_data);
    return {};
  });
}

// Runs the passes that `read` appends.
template <typename Read>
ffi::Error Run(ffi::ThreadPool threads, const char* op, Read read) {
  std::vector<PassPtr> passes;
  Status status = read(&passes);
  if (status.ok()) status = RunPasses(passes, MakePool(threads));
  return ToError(status, op);
}

ffi::Error ForwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer sentinel, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Dictionary attrs) {
  return Run(threads, "embed_bag", [&](std::vector<PassPtr>* passes) {
    return ReadForward({attrs, {ids, offsets, weights}, table}, sentinel, *out, &passes->emplace_back());
  });
}

ffi::Error BackwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                        ffi::AnyBuffer out_gradient, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> weight_gradient,
                        ffi::Result<ffi::AnyBuffer> gradient, ffi::Dictionary attrs) {
  return Run(threads, "embed_bag_backward", [&](std::vector<PassPtr>* passes) {
    return ReadBackward({attrs, {ids, offsets, weights}, table}, out_gradient, *weight_gradient, *gradient,
                        &passes->emplace_back());
  });
}

ffi::Error UpdateImpl(ffi::ThreadPool threads, ffi::AnyBuffer /*forward_out*/, ffi::AnyBuffer ids,
                      ffi::AnyBuffer offsets, ffi::AnyBuffer weights, ffi::AnyBuffer out_gradient, ffi::AnyBuffer hyper,
                      ffi::AnyBuffer scale, ffi::AnyBuffer seed, ffi::AnyBuffer table, ffi::RemainingArgs slots,
                      ffi::Result<ffi::AnyBuffer> applied, ffi::Result<ffi::AnyBuffer> weight_gradient,
                      ffi::Result<ffi::AnyBuffer> new_table, ffi::RemainingRets new_slots, ffi::Dictionary attrs) {
  return Run(threads, "embed_bag_update", [&](std::vector<PassPtr>* passes) -> Status {
    SlotBuffers all;
    JAX_TT_RETURN_IF_ERROR(ReadSlots(attrs, slots, new_slots, &all));
    return ReadUpdate({attrs, {ids, offsets, weights}, table}, out_gradient, {hyper, scale, seed}, all, *applied,
                      *weight_gradient, *new_table, &passes->emplace_back());
  });
}

using Buffers = std::vector<ffi::AnyBuffer>;

// Reads the tables of a call one after another.  Attributes "0", "1" and so on are a dictionary for each.
class TableReader {
 public:
  TableReader(const Args& args, const Rets& rets, const ffi::Dictionary& attrs)
      : args_(args), rets_(rets), attrs_(attrs) {}

  bool done() const { return next_arg_ >= args_.size() && next_ret_ >= rets_.size(); }

  Status ReadAttrs(std::optional<ffi::Dictionary>* own) {
    auto found = attrs_.get<ffi::Dictionary>(std::to_string(next_table_));
    if (!found.has_value()) return InvalidArgument("a table has no attributes");
    *own = *found;
    ++next_table_;
    return {};
  }
  Status ReadArgs(size_t count, Buffers* buffers) {
    for (buffers->clear(); buffers->size() < count; ++next_arg_) {
      auto buffer = args_.get<ffi::AnyBuffer>(next_arg_);
      if (!buffer.has_value()) return InvalidArgument("an argument of a table is missing");
      buffers->push_back(*buffer);
    }
    return {};
  }
  Status ReadRets(size_t count, Buffers* buffers) {
    for (buffers->clear(); buffers->size() < count; ++next_ret_) {
      auto buffer = rets_.get<ffi::AnyBuffer>(next_ret_);
      if (!buffer.has_value()) return InvalidArgument("a result of a table is missing");
      buffers->push_back(**buffer);
    }
    return {};
  }

 private:
  const Args& args_;
  const Rets& rets_;
  const ffi::Dictionary& attrs_;
  size_t next_arg_ = 0, next_ret_ = 0;
  int next_table_ = 0;
};

// Runs the passes of all tables; read(attrs, reader, pass) reads one.
template <typename Read>
ffi::Error RunTables(ffi::ThreadPool threads, const char* op, const Args& args, const Rets& rets,
                     const ffi::Dictionary& attrs, Read read) {
  return Run(threads, op, [&](std::vector<PassPtr>* passes) -> Status {
    for (TableReader reader(args, rets, attrs); !reader.done();) {
      std::optional<ffi::Dictionary> own;
      JAX_TT_RETURN_IF_ERROR(reader.ReadAttrs(&own));
      JAX_TT_RETURN_IF_ERROR(read(*own, reader, &passes->emplace_back()));
    }
    return {};
  });
}

ffi::Error TablesForwardImpl(ffi::ThreadPool threads, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto read = [](const ffi::Dictionary& own, TableReader& reader, PassPtr* pass) -> Status {
    Buffers in, out;
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(5, &in));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(1, &out));
    return ReadForward({own, {in[0], in[1], in[2]}, in[4]}, in[3], out[0], pass);
  };
  return RunTables(threads, "embed_collection", args, rets, attrs, read);
}

ffi::Error TablesBackwardImpl(ffi::ThreadPool threads, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto read = [](const ffi::Dictionary& own, TableReader& reader, PassPtr* pass) -> Status {
    Buffers in, out;
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(5, &in));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(2, &out));
    return ReadBackward({own, {in[0], in[1], in[2]}, in[4]}, in[3], out[0], out[1], pass);
  };
  return RunTables(threads, "embed_collection_backward", args, rets, attrs, read);
}

ffi::Error TablesUpdateImpl(ffi::ThreadPool threads, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto read = [](const ffi::Dictionary& own, TableReader& reader, PassPtr* pass) -> Status {
    int kind = 0;
    JAX_TT_RETURN_IF_ERROR(ReadOptimizer(own, &kind));
    const auto count = static_cast<size_t>(kOptimizers[kind].slots());
    Buffers in, slots, out, new_slots;
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(9, &in));
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(count, &slots));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(3, &out));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(count, &new_slots));
    return ReadUpdate({own, {in[1], in[2], in[3]}, in[8]}, in[4], {in[5], in[6], in[7]}, {slots, new_slots}, out[0],
                      out[1], out[2], pass);
  };
  return RunTables(threads, "embed_collection_update", args, rets, attrs, read);
}

}  // namespace

// n = ids, G = groups, B = bags of a group, N x D = the table.
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 []
                                  .Arg<ffi::AnyBuffer>()  // table [N, D]
                                  .Ret<ffi::AnyBuffer>()  // out [G.., B, D]
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseBackwardCpu, BackwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
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
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // result of the forward pass: orders the update after it
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // out gradient [G.., B, D]
                                  .Arg<ffi::AnyBuffer>()  // hyper-parameters f32
                                  .Arg<ffi::AnyBuffer>()  // gradient scale f32 [2]
                                  .Arg<ffi::AnyBuffer>()  // seed u32 [2]
                                  .Arg<ffi::AnyBuffer>()  // table [N, D]
                                  .RemainingArgs()        // slots
                                  .Ret<ffi::AnyBuffer>()  // applied f32 []
                                  .Ret<ffi::AnyBuffer>()  // weight gradient [n], or empty
                                  .Ret<ffi::AnyBuffer>()  // table, in place
                                  .RemainingRets()        // slots, in place
                                  .Attrs());

// The same of many tables: the arguments of the first, then of the second, and so on; likewise the results.  The update
// has the slots of a table after the table.
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesForwardCpu, TablesForwardImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesBackwardCpu, TablesBackwardImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesUpdateCpu, TablesUpdateImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace jax_tt
