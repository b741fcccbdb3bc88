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

// The arguments of the passes over one table.
struct TableArgs {
  ffi::Dictionary attrs;
  BatchArgs batch;
  const ffi::AnyBuffer& table;
  Span64 columns = {};  // of its features, where one array has the vectors of all tables
};

// The vectors of all bags of a table, alone in `buffer` or among those of other tables.
template <typename T, typename Element>
Status ReadVectors(const Span64& columns, const ffi::AnyBuffer& buffer, std::string_view name, DenseProblem<T>* problem,
                   Element** data) {
  const int64_t bags = problem->lookups.groups * problem->lookups.bags;
  if (columns.size() == 0) return Data(buffer, name, bags * problem->dim, data);
  const auto sizes = buffer.dimensions();
  if (sizes.size() != 2) return InvalidArgument("an array of all features has two axes");
  if (static_cast<int64_t>(columns.size()) * sizes[0] != bags)
    return InvalidArgument("a feature must have one bag per sample");
  for (int64_t column : columns)
    if (column < 0 || column > sizes[1] - problem->dim) return InvalidArgument("columns are beyond the array");
  problem->vectors = {columns.begin(), sizes[0], sizes[1]};
  return Data(buffer, name, -1, data);
}

using PassPtr = std::unique_ptr<Pass>;

Status ReadForward(const TableArgs& args, const ffi::AnyBuffer& sentinel, const ffi::AnyBuffer& out, PassPtr* pass) {
  return DispatchStorage(args.table.element_type(), [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    DenseProblem<T> problem;
    typename DenseProblem<T>::C* out_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadProblem(args.attrs, args.batch, args.table, &problem));
    JAX_TT_RETURN_IF_ERROR(CheckSentinel(sentinel, problem.lookups.table));
    JAX_TT_RETURN_IF_ERROR(ReadVectors(args.columns, out, "out", &problem, &out_data));
    if (args.columns.size() == 0) PreferHugePages({out});
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
    JAX_TT_RETURN_IF_ERROR(ReadVectors(args.columns, out_gradient, "out gradient", &problem, &g));
    JAX_TT_RETURN_IF_ERROR(OptionalData(weight_gradient, "weight gradient", problem.lookups.size(), &weight_data));
    JAX_TT_RETURN_IF_ERROR(Data(gradient, "table gradient", Count(args.table), &gradient_data));
    PreferHugePages({gradient});
    *pass = DenseBackward(problem, g, gradient_data, weight_data);
    return {};
  });
}

// `applied` is for this table.
Status ReadUpdate(const TableArgs& args, const ffi::AnyBuffer& out_gradient, const OptimizerStep& step,
                  const SlotBuffers& slots, float* applied, const ffi::AnyBuffer& weight_gradient,
                  const ffi::AnyBuffer& new_table, PassPtr* pass) {
  return DispatchStorage(args.table.element_type(), [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    using C = typename DenseProblem<T>::C;
    DenseProblem<T> problem;
    RowTable<T> rows;
    const C* g = nullptr;
    C* weight_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadProblem(args.attrs, args.batch, args.table, &problem));
    JAX_TT_RETURN_IF_ERROR(ReadVectors(args.columns, out_gradient, "out gradient", &problem, &g));
    JAX_TT_RETURN_IF_ERROR(OptionalData(weight_gradient, "weight gradient", problem.lookups.size(), &weight_data));
    rows.width = problem.dim;
    JAX_TT_RETURN_IF_ERROR(ReadDenseTable(step.traits(), args.table, new_table, slots, &rows));
    *pass = DenseUpdate(problem, rows, g, step, weight_data, applied);
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
    OptimizerStep step;
    float* applied_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadSlots(attrs, slots, new_slots, &all));
    JAX_TT_RETURN_IF_ERROR(ReadStep(attrs, hyper, scale, seed, &step));
    JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
    return ReadUpdate({attrs, {ids, offsets, weights}, table}, out_gradient, step, all, applied_data, *weight_gradient,
                      *new_table, &passes->emplace_back());
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

// Runs the passes of all tables.  start(reader) reads what they have in common, and read(attrs, wide, columns, reader,
// pass) one of them; with the attribute columns, there are `wide_args` arguments and `wide_rets` results in between.
template <typename Start, typename Read>
ffi::Error RunTables(ffi::ThreadPool threads, const char* op, const Args& args, const Rets& rets,
                     const ffi::Dictionary& attrs, size_t wide_args, size_t wide_rets, Start start, Read read) {
  return Run(threads, op, [&](std::vector<PassPtr>* passes) -> Status {
    Buffers wide, results;
    Span64 columns;
    int64_t next_column = 0;
    TableReader reader(args, rets, attrs);
    JAX_TT_RETURN_IF_ERROR(start(reader));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "columns", &columns));
    if (columns.size() > 0) {
      JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(wide_args, &wide));
      JAX_TT_RETURN_IF_ERROR(reader.ReadRets(wide_rets, &results));
      for (const ffi::AnyBuffer& result : results) PreferHugePages({result});
      wide.insert(wide.end(), results.begin(), results.end());
    }
    while (!reader.done()) {
      std::optional<ffi::Dictionary> own;
      int64_t features = 0;
      JAX_TT_RETURN_IF_ERROR(reader.ReadAttrs(&own));
      if (columns.size() > 0) {
        JAX_TT_RETURN_IF_ERROR(ReadAttr(*own, "features", &features));
        if (features < 1 || features > static_cast<int64_t>(columns.size()) - next_column)
          return InvalidArgument("a table needs columns for its features");
      }
      const Span64 own_columns(columns.begin() + next_column, static_cast<size_t>(features));
      next_column += features;
      JAX_TT_RETURN_IF_ERROR(read(*own, wide, own_columns, reader, &passes->emplace_back()));
    }
    return {};
  });
}

Status NothingInCommon(TableReader& /*reader*/) { return {}; }

ffi::Error TablesForwardImpl(ffi::ThreadPool threads, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto read = [](const ffi::Dictionary& own, const Buffers& wide, Span64 columns, TableReader& reader,
                       PassPtr* pass) -> Status {
    Buffers in, out = wide;
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(5, &in));
    if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadRets(1, &out));
    return ReadForward({own, {in[0], in[1], in[2]}, in[4], columns}, in[3], out[0], pass);
  };
  return RunTables(threads, "embed_collection", args, rets, attrs, 0, 1, NothingInCommon, read);
}

ffi::Error TablesBackwardImpl(ffi::ThreadPool threads, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto read = [](const ffi::Dictionary& own, const Buffers& wide, Span64 columns, TableReader& reader,
                       PassPtr* pass) -> Status {
    Buffers in, gradient = wide, table, out;
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(3, &in));
    if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &gradient));
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &table));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(2, &out));
    return ReadBackward({own, {in[0], in[1], in[2]}, table[0], columns}, gradient[0], out[0], out[1], pass);
  };
  return RunTables(threads, "embed_collection_backward", args, rets, attrs, 1, 0, NothingInCommon, read);
}

ffi::Error TablesUpdateImpl(ffi::ThreadPool threads, Args args, Rets rets, ffi::Dictionary attrs) {
  StepsReader steps;
  float* applied = nullptr;
  int64_t applied_left = 0;
  const auto start = [&](TableReader& reader) -> Status {
    Buffers in, out;
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(3, &in));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(1, &out));
    JAX_TT_RETURN_IF_ERROR(steps.Start(in[0], in[1], in[2]));
    applied_left = Count(out[0]);
    return Data(out[0], "applied", applied_left, &applied);
  };
  const auto read = [&](const ffi::Dictionary& own, const Buffers& wide, Span64 columns, TableReader& reader,
                        PassPtr* pass) -> Status {
    OptimizerStep step;
    JAX_TT_RETURN_IF_ERROR(steps.Read(own, &step));
    if (applied_left-- == 0) return InvalidArgument("applied is shorter than the number of tables");
    const auto count = static_cast<size_t>(step.traits().slots());
    Buffers order, in, gradient, table, slots, out, new_slots;
    if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &order));
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(3, &in));
    if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &gradient));
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &table));
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(count, &slots));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(2, &out));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(count, &new_slots));
    return ReadUpdate({own, {in[0], in[1], in[2]}, table[0], columns}, wide.empty() ? gradient[0] : wide[1], step,
                      {slots, new_slots}, applied++, out[0], out[1], pass);
  };
  return RunTables(threads, "embed_collection_update", args, rets, attrs, 2, 0, start, read);
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
// has the slots of a table after the table; the hyper-parameters, scales and seeds of all tables, which follow each
// other in one array each, come first, as does the result applied [tables].  With the attribute columns, the vectors of
// all bags are columns of one array [samples, width], from these columns on, `features` of them for a table.  The array
// comes before the first table: the result out, or the argument out gradient, before which the update has the result of
// the forward pass.
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesForwardCpu, TablesForwardImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesBackwardCpu, TablesBackwardImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesUpdateCpu, TablesUpdateImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace jax_tt
