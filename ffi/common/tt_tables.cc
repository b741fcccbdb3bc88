#include "ffi/common/tt_tables.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace jax_tt {
namespace {

// The shape of a table with these cores.
Status ReadShape(const Buffers& cores, int64_t num_embeddings, TTShape* shape) {
  std::vector<int64_t> row_factors, col_factors, ranks{1};
  for (const ffi::AnyBuffer& core : cores) {
    const auto sizes = core.dimensions();
    if (sizes.size() != 4 || sizes[1] != ranks.back())
      return InvalidArgument("a core has four axes, and its left rank is the right rank of the core before");
    row_factors.push_back(sizes[0]);
    col_factors.push_back(sizes[2]);
    ranks.push_back(sizes[3]);
  }
  const auto span = [](const std::vector<int64_t>& values) { return Span64(values.data(), values.size()); };
  return ReadShape(span(row_factors), span(col_factors), span(ranks), num_embeddings, shape);
}

// A table of a call on many.
struct OneOfMany {
  std::optional<ffi::Dictionary> attrs;
  TTShape shape;
  Buffers in;  // before the cores
  size_t first_core = 0;

  // `before`: the number of arguments before the cores.
  Status Read(size_t before, TableReader& reader) {
    int64_t count = 0, num_embeddings = 0;
    Buffers cores;
    JAX_TT_RETURN_IF_ERROR(reader.ReadAttrs(&attrs));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(*attrs, "cores", &count));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(*attrs, "num_embeddings", &num_embeddings));
    if (count < 2 || count > kMaxCores) return InvalidArgument("a TT table has 2 to 5 cores");
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(before, &in));
    first_core = reader.next_arg();
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(static_cast<size_t>(count), &cores));
    return ReadShape(cores, num_embeddings, &shape);
  }
  // The batch, whose ids are the argument `ids`.
  TTTableArgs Given(const Args& args, size_t ids) const {
    return {shape, *attrs, {in[ids], in[ids + 1], in[ids + 2]}, args, first_core};
  }
};

// Calls read(own) for every table, which has `before` arguments before the cores.
template <typename Read>
Status ReadTables(TableReader& reader, size_t before, Read read) {
  while (!reader.done()) {
    OneOfMany own;
    Status status = own.Read(before, reader);
    if (status.ok()) status = read(own);
    JAX_TT_RETURN_IF_ERROR(Named(std::move(status), reader.table()));
  }
  return {};
}

}  // namespace

Status ReadTTForwardTables(const TablesCall& call, const ReadTTForward& read) {
  TableReader reader(call);
  return ReadTables(reader, 4, [&](const OneOfMany& own) -> Status {
    Buffers out;
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(3, &out));
    return read(own.Given(call.args, 0), {own.in[3], out[0], out[1], out[2]});
  });
}

Status ReadTTBackwardTables(const TablesCall& call, const ReadTTBackward& read) {
  TableReader reader(call);
  return ReadTables(reader, 6, [&](const OneOfMany& own) -> Status {
    Buffers out, gradients;
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(2, &out));
    const TTGradientArgs gradient{own.in[3], own.in[4], own.in[5], out[1], call.rets, reader.next_ret()};
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(static_cast<size_t>(own.shape.d), &gradients));
    return read(own.Given(call.args, 0), out[0], gradient);
  });
}

Status ReadTTUpdateTables(const TablesCall& call, const ReadTTUpdate& read) {
  TableReader reader(call);
  StepsReader steps;
  JAX_TT_RETURN_IF_ERROR(steps.Start(&reader));
  JAX_TT_RETURN_IF_ERROR(ReadTables(reader, 7, [&](const OneOfMany& own) -> Status {
    StepArgs step;
    float* applied = nullptr;
    Buffers slots, out, changed;
    JAX_TT_RETURN_IF_ERROR(steps.Read(*own.attrs, &step, &applied));
    const auto arrays = static_cast<size_t>(own.shape.d * (1 + step.traits().slots()));
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(arrays - static_cast<size_t>(own.shape.d), &slots));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(1, &out));
    const TTGradientArgs gradient{own.in[4], own.in[5], own.in[6], out[0], call.rets, reader.next_ret()};
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(arrays, &changed));
    return read(own.Given(call.args, 1), gradient, step, applied);
  }));
  return steps.Finish();
}

Status ReadTTApplyTables(const TablesCall& call, const ReadTTApply& read) {
  TableReader reader(call);
  StepsReader steps;
  JAX_TT_RETURN_IF_ERROR(steps.Start(&reader));
  JAX_TT_RETURN_IF_ERROR(ReadTables(reader, 1, [&](const OneOfMany& own) -> Status {
    StepArgs step;
    float* applied = nullptr;
    Buffers slots, gradients, changed;
    JAX_TT_RETURN_IF_ERROR(steps.Read(*own.attrs, &step, &applied));
    const auto cores = static_cast<size_t>(own.shape.d);
    const size_t arrays = cores * static_cast<size_t>(1 + step.traits().slots());
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(arrays - cores, &slots));
    const size_t first_gradient = reader.next_arg(), first_result = reader.next_ret();
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(cores, &gradients));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(arrays, &changed));
    return read(
        {reader.table(), own.shape, own.in[0], call.args, own.first_core, first_gradient, call.rets, first_result},
        step, applied);
  }));
  return steps.Finish();
}

}  // namespace jax_tt
