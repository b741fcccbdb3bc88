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

Status RunForward(cudaStream_t stream, std::vector<ForwardTable> tables, const ffi::AnyBuffer& workspace) {
  void* memory = nullptr;
  JAX_TT_RETURN_IF_ERROR(ReadWorkspaceFor("forward", tables, workspace, &memory));
  return DenseForward(stream, std::move(tables), memory);
}

Status RunBackward(cudaStream_t stream, std::vector<GradientTable> tables, const ffi::AnyBuffer& workspace) {
  void* memory = nullptr;
  JAX_TT_RETURN_IF_ERROR(ReadWorkspaceFor("backward", tables, workspace, &memory));
  return DenseBackward(stream, std::move(tables), memory);
}

Status RunUpdate(cudaStream_t stream, std::vector<GradientTable> tables, const ffi::AnyBuffer& workspace) {
  void* memory = nullptr;
  JAX_TT_RETURN_IF_ERROR(ReadWorkspaceFor("update", tables, workspace, &memory));
  return DenseUpdate(stream, std::move(tables), memory);
}

ffi::Error ForwardImpl(cudaStream_t stream, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer sentinel, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Result<ffi::AnyBuffer> workspace, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    std::vector<ForwardTable> tables(1);
    JAX_TT_RETURN_IF_ERROR(ReadForward({attrs, {ids, offsets, weights}, table}, {sentinel, *out}, &tables[0]));
    return RunForward(stream, std::move(tables), *workspace);
  };
  return ToError(run(), "embed_bag");
}

ffi::Error BackwardImpl(cudaStream_t stream, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                        ffi::AnyBuffer out_gradient, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> weight_gradient,
                        ffi::Result<ffi::AnyBuffer> gradient, ffi::Result<ffi::AnyBuffer> workspace,
                        ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    std::vector<GradientTable> tables(1);
    JAX_TT_RETURN_IF_ERROR(
        ReadBackward({attrs, {ids, offsets, weights}, table}, {out_gradient, *weight_gradient, *gradient}, &tables[0]));
    return RunBackward(stream, std::move(tables), *workspace);
  };
  return ToError(run(), "embed_bag_backward");
}

ffi::Error UpdateImpl(cudaStream_t stream, ffi::AnyBuffer /*forward_out*/, ffi::AnyBuffer ids, ffi::AnyBuffer offsets,
                      ffi::AnyBuffer weights, ffi::AnyBuffer out_gradient, ffi::AnyBuffer hyper, ffi::AnyBuffer scale,
                      ffi::AnyBuffer seed, ffi::AnyBuffer table, ffi::RemainingArgs slots,
                      ffi::Result<ffi::AnyBuffer> applied, ffi::Result<ffi::AnyBuffer> weight_gradient,
                      ffi::Result<ffi::AnyBuffer> new_table, ffi::RemainingRets results, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    StepArgs step;
    SlotBuffers all_slots;
    float* applied_data = nullptr;
    std::vector<GradientTable> tables(1);
    JAX_TT_RETURN_IF_ERROR(ReadStepArgs(attrs, hyper, scale, seed, &step));
    JAX_TT_RETURN_IF_ERROR(ReadSlots(attrs, slots, results, &all_slots));
    JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
    JAX_TT_RETURN_IF_ERROR(ReadUpdate({attrs, {ids, offsets, weights}, table},
                                      {step, all_slots, applied_data, out_gradient, *weight_gradient, *new_table},
                                      &tables[0]));
    std::optional<ffi::AnyBuffer> workspace;
    JAX_TT_RETURN_IF_ERROR(LastResult(results, &workspace));
    return RunUpdate(stream, std::move(tables), *workspace);
  };
  return ToError(run(), "embed_bag_update");
}

// A call on many tables, whose last result is the workspace: reads them with read(call, of_table), which hands each to
// read_table, and runs the pass on them.
template <typename Table, typename ReadTables, typename ReadTable, typename Run>
Status RunTables(cudaStream_t stream, const Args& args, const Rets& rets, const ffi::Dictionary& attrs, ReadTables read,
                 ReadTable read_table, Run run) {
  std::vector<Table> tables;
  std::optional<ffi::AnyBuffer> workspace;
  JAX_TT_RETURN_IF_ERROR(LastResult(rets, &workspace));
  JAX_TT_RETURN_IF_ERROR(read({args, rets, attrs, rets.size() - 1}, [&](const TableArgs& table, const auto& own) {
    return read_table(table, own, &tables.emplace_back());
  }));
  return run(stream, std::move(tables), *workspace);
}

ffi::Error TablesForwardImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  return ToError(RunTables<ForwardTable>(stream, args, rets, attrs, ReadForwardTables, ReadForward, RunForward),
                 "lookup_features");
}

ffi::Error TablesBackwardImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  return ToError(RunTables<GradientTable>(stream, args, rets, attrs, ReadBackwardTables, ReadBackward, RunBackward),
                 "lookup_features_backward");
}

ffi::Error TablesUpdateImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  return ToError(RunTables<GradientTable>(stream, args, rets, attrs, ReadUpdateTables, ReadUpdate, RunUpdate),
                 "lookup_features_update");
}

}  // namespace

// As on the CPU (ffi/cpu/dense/ffi.cc), with the stream for the thread pool and one result more, the workspace.
// n = ids, G = groups, B = bags of a group, N x D = the table.
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseForwardCuda, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 []
                                  .Arg<ffi::AnyBuffer>()  // table [N, D], or packed rows u8 [N, W] or f32 [N, W / 4]
                                  .Ret<ffi::AnyBuffer>()  // out [G.., B, D]
                                  .Ret<ffi::AnyBuffer>()  // workspace u8 [bytes]
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseBackwardCuda, BackwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // out gradient [G.., B, D]
                                  .Arg<ffi::AnyBuffer>()  // table [N, D]
                                  .Ret<ffi::AnyBuffer>()  // weight gradient [n], or empty
                                  .Ret<ffi::AnyBuffer>()  // table gradient [N, D]
                                  .Ret<ffi::AnyBuffer>()  // workspace u8 [bytes]
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseUpdateCuda, UpdateImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // result of the forward pass: only to run after it
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
                                  .RemainingRets()        // slots, in place, then workspace u8 [bytes]
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

// The same of many tables, as ffi/common/dense_tables.h describes them; the last result is the workspace u8 [bytes].
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesForwardCuda, TablesForwardImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesBackwardCuda, TablesBackwardImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseTablesUpdateCuda, TablesUpdateImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_tt
