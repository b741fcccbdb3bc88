#include "ffi/common/dense_tables.h"

#include <optional>

namespace jax_tt {
namespace {

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
    JAX_TT_RETURN_IF_ERROR(Named(read(*own, wide, own_columns), reader.table()));
  }
  if (next_column != static_cast<int64_t>(columns.size())) return InvalidArgument("no table has the last columns");
  return {};
}

}  // namespace

Status ReadForwardTables(const TablesCall& call,
                         const std::function<Status(const TableArgs&, const ForwardArgs&)>& read) {
  TableReader reader(call);
  return ReadTables(call, {0, 1}, reader,
                    [&](const ffi::Dictionary& own, const Buffers& wide, const Span64& columns) -> Status {
                      Buffers in, sentinel, table, out = wide;
                      JAX_TT_RETURN_IF_ERROR(reader.ReadBatch(own, &in));
                      JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &sentinel));
                      JAX_TT_RETURN_IF_ERROR(reader.ReadRowArgs(own, 1, &table));
                      if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadRets(1, &out));
                      return read({own, {in[0], in[1], in[2]}, table[0], columns}, {sentinel[0], out[0]});
                    });
}

Status ReadBackwardTables(const TablesCall& call,
                          const std::function<Status(const TableArgs&, const BackwardArgs&)>& read) {
  TableReader reader(call);
  return ReadTables(call, {1, 0}, reader,
                    [&](const ffi::Dictionary& own, const Buffers& wide, const Span64& columns) -> Status {
                      Buffers in, gradient = wide, table, out;
                      JAX_TT_RETURN_IF_ERROR(reader.ReadBatch(own, &in));
                      if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &gradient));
                      JAX_TT_RETURN_IF_ERROR(reader.ReadRowArgs(own, 1, &table));
                      JAX_TT_RETURN_IF_ERROR(reader.ReadRets(2, &out));
                      return read({own, {in[0], in[1], in[2]}, table[0], columns}, {gradient[0], out[0], out[1]});
                    });
}

Status ReadUpdateTables(const TablesCall& call,
                        const std::function<Status(const TableArgs&, const UpdateArgs&)>& read) {
  TableReader reader(call);
  StepsReader steps;
  JAX_TT_RETURN_IF_ERROR(steps.Start(&reader));
  JAX_TT_RETURN_IF_ERROR(ReadTables(
      call, {2, 0}, reader, [&](const ffi::Dictionary& own, const Buffers& wide, const Span64& columns) -> Status {
        StepArgs step;
        float* own_applied = nullptr;
        JAX_TT_RETURN_IF_ERROR(steps.Read(own, &step, &own_applied));
        const auto count = static_cast<size_t>(step.traits().slots());
        Buffers order, in, gradient, rows, dweights, new_rows;
        if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &order));
        JAX_TT_RETURN_IF_ERROR(reader.ReadBatch(own, &in));
        if (wide.empty()) JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &gradient));
        JAX_TT_RETURN_IF_ERROR(reader.ReadRowArgs(own, 1 + count, &rows));
        JAX_TT_RETURN_IF_ERROR(reader.ReadRets(1, &dweights));
        JAX_TT_RETURN_IF_ERROR(reader.ReadRowRets(own, 1 + count, &new_rows));
        const SlotBuffers slots = {{rows.begin() + 1, rows.end()}, {new_rows.begin() + 1, new_rows.end()}};
        return read({own, {in[0], in[1], in[2]}, rows[0], columns},
                    {step, slots, own_applied, wide.empty() ? gradient[0] : wide[1], dweights[0], new_rows[0]});
      }));
  return steps.Finish();
}

}  // namespace jax_tt
