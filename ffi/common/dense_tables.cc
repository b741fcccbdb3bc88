#include "ffi/common/dense_tables.h"

#include <optional>
#include <string>
#include <vector>

namespace jax_tt {
namespace {

using Buffers = std::vector<ffi::AnyBuffer>;

// Reads the tables of a call one after another.
class TableReader {
 public:
  explicit TableReader(const TablesCall& call) : call_(call) {}

  bool done() const { return next_arg_ >= call_.args.size() && next_ret_ >= call_.results; }

  Status ReadAttrs(std::optional<ffi::Dictionary>* own) {
    auto found = call_.attrs.get<ffi::Dictionary>(std::to_string(next_table_));
    if (!found.has_value()) return InvalidArgument("a table has no attributes");
    *own = *found;
    ++next_table_;
    return {};
  }
  Status ReadArgs(size_t count, Buffers* buffers) {
    for (buffers->clear(); buffers->size() < count; ++next_arg_) {
      auto buffer = call_.args.get<ffi::AnyBuffer>(next_arg_);
      if (!buffer.has_value()) return InvalidArgument("an argument of a table is missing");
      buffers->push_back(*buffer);
    }
    return {};
  }
  Status ReadRets(size_t count, Buffers* buffers) {
    for (buffers->clear(); buffers->size() < count; ++next_ret_) {
      if (next_ret_ >= call_.results) return InvalidArgument("a result of a table is missing");
      auto buffer = call_.rets.get<ffi::AnyBuffer>(next_ret_);
      if (!buffer.has_value()) return InvalidArgument("a result of a table is missing");
      buffers->push_back(**buffer);
    }
    return {};
  }

 private:
  const TablesCall& call_;
  size_t next_arg_ = 0, next_ret_ = 0;
  int next_table_ = 0;
};

// Reads the array of all features, where there is one: `args` arguments and `rets` results.
struct WideReader {
  size_t args, rets;

  Status Read(const TablesCall& call, TableReader& reader, Span64* columns, Buffers* wide) const {
    JAX_TT_RETURN_IF_ERROR(ReadAttr(call.attrs, "columns", columns));
    if (columns->size() == 0) return {};
    Buffers results;
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(args, wide));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(rets, &results));
    wide->insert(wide->end(), results.begin(), results.end());
    return {};
  }
};

// Calls read(attrs, wide, columns) for every table; `wide` is empty without the attribute columns.
template <typename Read>
Status ReadTables(const TablesCall& call, const WideReader& of_all, TableReader& reader, Read read) {
  Buffers wide;
  Span64 columns;
  JAX_TT_RETURN_IF_ERROR(of_all.Read(call, reader, &columns, &wide));
  int64_t next_column = 0;
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
    JAX_TT_RETURN_IF_ERROR(read(*own, wide, own_columns));
  }
  if (next_column != static_cast<int64_t>(columns.size())) return InvalidArgument("no table has the last columns");
  return {};
}

// Reads the steps of several tables, whose numbers follow each other in one array each.
class StepsReader {
 public:
  Status Start(const Buffers& args, const ffi::AnyBuffer& applied) {
    hyper_left_ = Count(args[0]);
    tables_left_ = Count(args[1]) / 2;
    JAX_TT_RETURN_IF_ERROR(Data(args[0], "hyper-parameters", hyper_left_, &next_.hyper));
    JAX_TT_RETURN_IF_ERROR(Data(args[1], "gradient scales", 2 * tables_left_, &next_.scale));
    JAX_TT_RETURN_IF_ERROR(Data(args[2], "seeds", 2 * tables_left_, &next_.seed));
    applied_left_ = Count(applied);
    return Data(applied, "applied", applied_left_, &applied_);
  }
  // Must be called after the last table.
  Status Finish() const {
    if (hyper_left_ == 0 && tables_left_ == 0 && applied_left_ == 0) return {};
    return InvalidArgument("there are hyper-parameters, scales or results of more tables than the call has");
  }
  // The step of the next table, which has these attributes, and its place in `applied`.
  Status Read(const ffi::Dictionary& attrs, StepArgs* step, float** applied) {
    JAX_TT_RETURN_IF_ERROR(ReadUpdateAttrs(attrs, &next_));
    const int64_t hypers = next_.traits().hyperparameters;
    if (hypers > hyper_left_ || tables_left_ == 0) return InvalidArgument("hyper-parameters of a table are missing");
    if (applied_left_ == 0) return InvalidArgument("applied is shorter than the number of tables");
    *step = next_;
    *applied = applied_++;
    next_.hyper += hypers;
    next_.scale += 2;
    next_.seed += 2;
    hyper_left_ -= hypers;
    --tables_left_;
    --applied_left_;
    return {};
  }

 private:
  StepArgs next_;
  float* applied_ = nullptr;
  int64_t hyper_left_ = 0, tables_left_ = 0, applied_left_ = 0;
};

}  // namespace

Status ReadForwardTables(const TablesCall& call,
                         const std::function<Status(const TableArgs&, const ForwardArgs&)>& read) {
  TableReader reader(call);
  return ReadTables(call, {0, 1}, reader,
                    [&](const ffi::Dictionary& own, const Buffers& wide, const Span64& columns) -> Status {
                      Buffers in, out = wide;
                      JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(5, &in));
                      if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadRets(1, &out));
                      return read({own, {in[0], in[1], in[2]}, in[4], columns}, {in[3], out[0]});
                    });
}

Status ReadBackwardTables(const TablesCall& call,
                          const std::function<Status(const TableArgs&, const BackwardArgs&)>& read) {
  TableReader reader(call);
  return ReadTables(call, {1, 0}, reader,
                    [&](const ffi::Dictionary& own, const Buffers& wide, const Span64& columns) -> Status {
                      Buffers in, gradient = wide, table, out;
                      JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(3, &in));
                      if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &gradient));
                      JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &table));
                      JAX_TT_RETURN_IF_ERROR(reader.ReadRets(2, &out));
                      return read({own, {in[0], in[1], in[2]}, table[0], columns}, {gradient[0], out[0], out[1]});
                    });
}

Status ReadUpdateTables(const TablesCall& call,
                        const std::function<Status(const TableArgs&, const UpdateArgs&)>& read) {
  TableReader reader(call);
  StepsReader steps;
  Buffers of_steps, applied;
  JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(3, &of_steps));
  JAX_TT_RETURN_IF_ERROR(reader.ReadRets(1, &applied));
  JAX_TT_RETURN_IF_ERROR(steps.Start(of_steps, applied[0]));
  JAX_TT_RETURN_IF_ERROR(ReadTables(
      call, {2, 0}, reader, [&](const ffi::Dictionary& own, const Buffers& wide, const Span64& columns) -> Status {
        StepArgs step;
        float* own_applied = nullptr;
        JAX_TT_RETURN_IF_ERROR(steps.Read(own, &step, &own_applied));
        const auto count = static_cast<size_t>(step.traits().slots());
        Buffers order, in, gradient, table, out;
        SlotBuffers slots;
        if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &order));
        JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(3, &in));
        if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &gradient));
        JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &table));
        JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(count, &slots.in));
        JAX_TT_RETURN_IF_ERROR(reader.ReadRets(2, &out));
        JAX_TT_RETURN_IF_ERROR(reader.ReadRets(count, &slots.out));
        return read({own, {in[0], in[1], in[2]}, table[0], columns},
                    {step, slots, own_applied, wide.empty() ? gradient[0] : wide[1], out[0], out[1]});
      }));
  return steps.Finish();
}

}  // namespace jax_tt
