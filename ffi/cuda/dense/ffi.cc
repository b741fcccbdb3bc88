// FFI handlers of dense tables on the GPU: shapes and types are checked here, launches are elsewhere.
#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/common/dense_tables.h"
#include "ffi/common/packed_table.h"
#include "ffi/cuda/dense/dense.h"
#include "ffi/cuda/gpu_args.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/notices.h"
#include "ffi/cuda/stream.h"

namespace jax_tt {
namespace {

Status CheckColumns(const DenseBatch& batch) {
  constexpr int64_t kMaxColumns = int64_t{1} << 30;
  return batch.dim <= kMaxColumns ? Status{} : InvalidArgument("a dense table has at most 2^30 columns");
}

Status ReadBatch(const TableArgs& args, DenseBatch* batch) {
  Lookups lookups;
  JAX_TT_RETURN_IF_ERROR(ReadDenseCall(args.attrs, args.batch, args.table, &lookups, batch));
  FindNotice(batch->num_embeddings, &lookups);
  batch->type = lookups.type;
  batch->bounds = lookups.bounds;
  batch->padded = lookups.padded;
  batch->ids = lookups.ids;
  batch->offsets = lookups.offsets;
  batch->groups = lookups.groups;
  batch->capacity = lookups.capacity;
  batch->bags = lookups.bags;
  batch->notice = lookups.notice;
  return CheckColumns(*batch);
}

// A table and its slots by the type that it is stored in.
template <typename T>
struct Typed {
  T* values = nullptr;
  SlotArrays slots;
};

// Calls read(Typed<T>*), and hands on what it has read.
template <typename Read>
Status ReadTyped(const ffi::AnyBuffer& table, Storage* storage, Typed<void>* in_place, Read read) {
  return DispatchGpuStorage(table.element_type(), [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    Typed<T> typed;
    JAX_TT_RETURN_IF_ERROR(read(&typed));
    *storage = kStorage<T>;
    in_place->values = typed.values;
    in_place->slots = typed.slots;
    return {};
  });
}

// The storage and the values of a table that is only read.
Status ReadValues(const ffi::AnyBuffer& table, Storage* storage, void** values) {
  Typed<void> found;
  JAX_TT_RETURN_IF_ERROR(
      ReadTyped(table, storage, &found, [&](auto* typed) { return Data(table, "table", -1, &typed->values); }));
  *values = found.values;
  return {};
}

Status ReadForward(const TableArgs& args, const ForwardArgs& own, ForwardTable* table) {
  JAX_TT_RETURN_IF_ERROR(ReadBatch(args, &table->batch));
  int64_t bits = 0;
  JAX_TT_RETURN_IF_ERROR(ReadBits(args.attrs, &bits));
  if (bits == 0) {
    void* values = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadValues(args.table, &table->storage, &values));
    table->values = values;
  } else {
    JAX_TT_RETURN_IF_ERROR(
        ReadPackedRows(args.attrs, args.table, bits, &table->values, &table->batch.dim, &table->levels));
    JAX_TT_RETURN_IF_ERROR(CheckColumns(table->batch));
    table->bits = static_cast<int>(bits);
    table->storage = Storage::kPacked;
  }
  JAX_TT_RETURN_IF_ERROR(Data(own.sentinel, "sentinel", 1, &table->sentinel));
  return ReadVectors(args.columns, own.out, "out", table->batch.total_bags(), table->batch.dim, &table->vectors,
                     &table->out);
}

// What a backward pass and an update have in common.
Status ReadGradient(const TableArgs& args, const ffi::AnyBuffer& out_gradient, const ffi::AnyBuffer& weight_gradient,
                    GradientTable* table) {
  JAX_TT_RETURN_IF_ERROR(ReadBatch(args, &table->batch));
  JAX_TT_RETURN_IF_ERROR(ReadVectors(args.columns, out_gradient, "out gradient", table->batch.total_bags(),
                                     table->batch.dim, &table->vectors, &table->out_gradient));
  return OptionalData(weight_gradient, "weight gradient", table->batch.n(), &table->weight_gradient);
}

Status ReadBackward(const TableArgs& args, const BackwardArgs& own, GradientTable* table) {
  JAX_TT_RETURN_IF_ERROR(ReadGradient(args, own.out_gradient, own.weight_gradient, table));
  JAX_TT_RETURN_IF_ERROR(ReadValues(args.table, &table->storage, &table->values));
  return Data(own.gradient, "table gradient", Count(args.table), &table->gradient);
}

Status ReadUpdate(const TableArgs& args, const UpdateArgs& own, GradientTable* table) {
  JAX_TT_RETURN_IF_ERROR(ReadGradient(args, own.out_gradient, own.weight_gradient, table));
  Typed<void> in_place;
  JAX_TT_RETURN_IF_ERROR(ReadTyped(args.table, &table->storage, &in_place, [&](auto* typed) {
    return ReadDenseTable(own.step.traits(), args.table, own.new_table, own.slots, typed);
  }));
  table->values = in_place.values;
  table->slots = in_place.slots;
  const StepArgs& step = own.step;
  const float *hyper = nullptr, *scale = nullptr;
  JAX_TT_RETURN_IF_ERROR(step.Numbers(&hyper, &scale));
  table->step = {step.kind, step.skip_nonfinite, step.stochastic_rounding, hyper, scale, step.seed};
  table->applied = own.applied;
  return {};
}

// The workspace of an op on these tables.
template <typename Table>
Status ReadWorkspaceFor(std::string_view op, const std::vector<Table>& tables, const ffi::AnyBuffer& buffer,
                        void** memory) {
  std::vector<DenseSize> sizes;
  int64_t columns = 0, bytes = 0;
  for (const Table& table : tables) {
    sizes.push_back({table.batch.num_embeddings, table.batch.dim, table.batch.n()});
    // Without samples there are columns too, of which none is read.
    if (table.vectors.columns != nullptr)
      columns += std::max<int64_t>(1, table.vectors.features(table.batch.total_bags()));
  }
  JAX_TT_RETURN_IF_ERROR(DenseWorkspace(op, sizes, columns, &bytes));
  return ReadWorkspace(buffer, bytes, memory);
}

// Reads the tables of a call, whose last result is the workspace, and runs pass(stream, tables, memory) on them.
// read(call, of_table) hands each table to read_table.
template <typename Table, typename ReadTables, typename ReadTable, typename Pass>
ffi::Error Run(std::string_view op, cudaStream_t stream, const Args& args, const Rets& rets,
               const ffi::Dictionary& attrs, ReadTables read, ReadTable read_table, Pass pass) {
  const auto run = [&]() -> Status {
    std::vector<Table> tables;
    std::optional<ffi::AnyBuffer> workspace;
    void* memory = nullptr;
    JAX_TT_RETURN_IF_ERROR(LastResult(rets, &workspace));
    JAX_TT_RETURN_IF_ERROR(read({args, rets, attrs, rets.size() - 1}, [&](const TableArgs& table, const auto& own) {
      return read_table(table, own, &tables.emplace_back());
    }));
    JAX_TT_RETURN_IF_ERROR(ReadWorkspaceFor(op, tables, *workspace, &memory));
    return pass(stream, std::move(tables), memory);
  };
  return ToError(run(), attrs);
}

ffi::Error ForwardImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run<ForwardTable>("forward", stream, args, rets, attrs, ReadForwardTables, ReadForward, DenseForward);
}

ffi::Error BackwardImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run<GradientTable>("backward", stream, args, rets, attrs, ReadBackwardTables, ReadBackward, DenseBackward);
}

ffi::Error UpdateImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run<GradientTable>("update", stream, args, rets, attrs, ReadUpdateTables, ReadUpdate, DenseUpdate);
}

}  // namespace

// ffi/common/dense_tables.h describes the arguments and results; the last result is the workspace u8 [bytes].
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseForwardCuda, ForwardImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseBackwardCuda, BackwardImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseUpdateCuda, UpdateImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_tt
