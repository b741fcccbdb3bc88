// FFI handlers of dense tables on the GPU: shapes and types are checked here, launches are elsewhere.
#include "ffi/common/call_args.h"
#include "ffi/cuda/dense.h"
#include "ffi/cuda/dense_handlers.h"
#include "ffi/cuda/gpu_args.h"
#include "ffi/cuda/notices.h"
#include "ffi/cuda/stream.h"

namespace jax_tt {
namespace {

Status ReadBatch(const ffi::Dictionary& attrs, const BatchArgs& args, const ffi::AnyBuffer& table, DenseBatch* batch) {
  Lookups lookups;
  JAX_TT_RETURN_IF_ERROR(ReadDenseCall(attrs, args, table, &lookups, batch));
  constexpr int64_t kMaxColumns = int64_t{1} << 30;
  if (batch->dim > kMaxColumns) return InvalidArgument("a dense table has at most 2^30 columns");
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
  return {};
}

int64_t OutCount(const DenseBatch& batch) { return batch.total_bags() * batch.dim; }

int64_t WorkspaceOf(std::string_view op, const DenseBatch& batch) {
  return DenseWorkspace(op, batch.num_embeddings, batch.dim, batch.n());
}

ffi::Error ForwardImpl(cudaStream_t stream, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer sentinel, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Result<ffi::AnyBuffer> /*workspace*/, ffi::Dictionary attrs) {
  return ToError(DispatchGpuStorage(table.element_type(),
                                    [&](auto tag) -> Status {
                                      using T = typename decltype(tag)::type;
                                      DenseBatch batch;
                                      const T* table_data = nullptr;
                                      const float* sentinel_data = nullptr;
                                      float* out_data = nullptr;
                                      JAX_TT_RETURN_IF_ERROR(ReadBatch(attrs, {ids, offsets, weights}, table, &batch));
                                      JAX_TT_RETURN_IF_ERROR(Data(table, "table", -1, &table_data));
                                      JAX_TT_RETURN_IF_ERROR(Data(sentinel, "sentinel", 1, &sentinel_data));
                                      JAX_TT_RETURN_IF_ERROR(Data(*out, "out", OutCount(batch), &out_data));
                                      return DenseForward(stream, batch, table_data, sentinel_data, out_data);
                                    }),
                 "embed_bag");
}

ffi::Error BackwardImpl(cudaStream_t stream, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                        ffi::AnyBuffer out_gradient, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> weight_gradient,
                        ffi::Result<ffi::AnyBuffer> gradient, ffi::Result<ffi::AnyBuffer> workspace,
                        ffi::Dictionary attrs) {
  return ToError(
      DispatchGpuStorage(table.element_type(),
                         [&](auto tag) -> Status {
                           using T = typename decltype(tag)::type;
                           DenseBatch batch;
                           const T* table_data = nullptr;
                           const float* g = nullptr;
                           float *gradient_data = nullptr, *weight_data = nullptr;
                           void* memory = nullptr;
                           JAX_TT_RETURN_IF_ERROR(ReadBatch(attrs, {ids, offsets, weights}, table, &batch));
                           JAX_TT_RETURN_IF_ERROR(Data(table, "table", -1, &table_data));
                           JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", OutCount(batch), &g));
                           JAX_TT_RETURN_IF_ERROR(
                               OptionalData(*weight_gradient, "weight gradient", batch.n(), &weight_data));
                           JAX_TT_RETURN_IF_ERROR(Data(*gradient, "table gradient", Count(table), &gradient_data));
                           JAX_TT_RETURN_IF_ERROR(ReadWorkspace(*workspace, WorkspaceOf("backward", batch), &memory));
                           return DenseBackward(stream, batch, table_data, g, gradient_data, weight_data, memory);
                         }),
      "embed_bag_backward");
}

ffi::Error UpdateImpl(cudaStream_t stream, ffi::AnyBuffer /*forward_out*/, ffi::AnyBuffer ids, ffi::AnyBuffer offsets,
                      ffi::AnyBuffer weights, ffi::AnyBuffer out_gradient, ffi::AnyBuffer hyper, ffi::AnyBuffer scale,
                      ffi::AnyBuffer seed, ffi::AnyBuffer table, ffi::RemainingArgs slots,
                      ffi::Result<ffi::AnyBuffer> applied, ffi::Result<ffi::AnyBuffer> weight_gradient,
                      ffi::Result<ffi::AnyBuffer> new_table, ffi::RemainingRets results, ffi::Dictionary attrs) {
  return ToError(
      DispatchGpuStorage(
          table.element_type(),
          [&](auto tag) -> Status {
            using T = typename decltype(tag)::type;
            DenseBatch batch;
            DenseTable<T> in_place;
            StepArgs args;
            const float* g = nullptr;
            float *weight_data = nullptr, *applied_data = nullptr;
            void* memory = nullptr;
            JAX_TT_RETURN_IF_ERROR(ReadStepArgs(attrs, hyper, scale, seed, &args));
            JAX_TT_RETURN_IF_ERROR(ReadBatch(attrs, {ids, offsets, weights}, table, &batch));
            JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", OutCount(batch), &g));
            JAX_TT_RETURN_IF_ERROR(OptionalData(*weight_gradient, "weight gradient", batch.n(), &weight_data));
            JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
            SlotBuffers all_slots;
            JAX_TT_RETURN_IF_ERROR(ReadSlots(attrs, slots, results, &all_slots));
            JAX_TT_RETURN_IF_ERROR(ReadDenseTable(args.traits(), table, *new_table, all_slots, &in_place));
            JAX_TT_RETURN_IF_ERROR(ReadLastWorkspace(results, WorkspaceOf("update", batch), &memory));
            const DenseStep step{args.kind,  args.skip_nonfinite, args.stochastic_rounding,
                                 args.hyper, args.scale,          args.seed};
            return DenseUpdate(stream, batch, in_place, g, step, weight_data, applied_data, memory);
          }),
      "embed_bag_update");
}

}  // namespace

// As on the CPU (ffi/cpu/dense_ffi.cc), with the stream for the thread pool and one result more, the workspace.
// n = ids, G = groups, B = bags of a group, N x D = the table.
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseForwardCuda, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 []
                                  .Arg<ffi::AnyBuffer>()  // table [N, D]
                                  .Ret<ffi::AnyBuffer>()  // out [G.., B, D]
                                  .Ret<ffi::AnyBuffer>()  // workspace: none is needed
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

}  // namespace jax_tt
