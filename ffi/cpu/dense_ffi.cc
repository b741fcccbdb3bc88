// FFI handlers of dense tables.
#include <string_view>

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

ffi::Error ForwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer sentinel, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Dictionary attrs) {
  return ToError(DispatchStorage(table.element_type(),
                                 [&](auto tag) -> Status {
                                   using T = typename decltype(tag)::type;
                                   DenseProblem<T> problem;
                                   typename DenseProblem<T>::C* out_data = nullptr;
                                   JAX_TT_RETURN_IF_ERROR(ReadProblem(attrs, {ids, offsets, weights}, table, &problem));
                                   JAX_TT_RETURN_IF_ERROR(CheckSentinel(sentinel, problem.lookups.table));
                                   JAX_TT_RETURN_IF_ERROR(Data(*out, "out", OutCount(problem), &out_data));
                                   return DenseForward(problem, MakePool(threads), out_data);
                                 }),
                 "embed_bag");
}

ffi::Error BackwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                        ffi::AnyBuffer out_gradient, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> weight_gradient,
                        ffi::Result<ffi::AnyBuffer> gradient, ffi::Dictionary attrs) {
  return ToError(
      DispatchStorage(table.element_type(),
                      [&](auto tag) -> Status {
                        using T = typename decltype(tag)::type;
                        using C = typename DenseProblem<T>::C;
                        DenseProblem<T> problem;
                        const C* g = nullptr;
                        C* gradient_data = nullptr;
                        C* weight_data = nullptr;
                        JAX_TT_RETURN_IF_ERROR(ReadProblem(attrs, {ids, offsets, weights}, table, &problem));
                        JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", OutCount(problem), &g));
                        JAX_TT_RETURN_IF_ERROR(
                            OptionalData(*weight_gradient, "weight gradient", problem.lookups.size(), &weight_data));
                        JAX_TT_RETURN_IF_ERROR(Data(*gradient, "table gradient", Count(table), &gradient_data));
                        return DenseBackward(problem, MakePool(threads), g, gradient_data, weight_data);
                      }),
      "embed_bag_backward");
}

ffi::Error UpdateImpl(ffi::ThreadPool threads, ffi::AnyBuffer /*forward_out*/, ffi::AnyBuffer ids,
                      ffi::AnyBuffer offsets, ffi::AnyBuffer weights, ffi::AnyBuffer out_gradient, ffi::AnyBuffer hyper,
                      ffi::AnyBuffer scale, ffi::AnyBuffer seed, ffi::AnyBuffer table, ffi::RemainingArgs slots,
                      ffi::Result<ffi::AnyBuffer> applied, ffi::Result<ffi::AnyBuffer> weight_gradient,
                      ffi::Result<ffi::AnyBuffer> new_table, ffi::RemainingRets new_slots, ffi::Dictionary attrs) {
  return ToError(
      DispatchStorage(table.element_type(),
                      [&](auto tag) -> Status {
                        using T = typename decltype(tag)::type;
                        using C = typename DenseProblem<T>::C;
                        DenseProblem<T> problem;
                        OptimizerStep step;
                        RowTable<T> rows;
                        const C* g = nullptr;
                        C* weight_data = nullptr;
                        float* applied_data = nullptr;
                        JAX_TT_RETURN_IF_ERROR(ReadStep(attrs, hyper, scale, seed, &step));
                        JAX_TT_RETURN_IF_ERROR(ReadProblem(attrs, {ids, offsets, weights}, table, &problem));
                        JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", OutCount(problem), &g));
                        JAX_TT_RETURN_IF_ERROR(
                            OptionalData(*weight_gradient, "weight gradient", problem.lookups.size(), &weight_data));
                        JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
                        rows.width = problem.dim;
                        JAX_TT_RETURN_IF_ERROR(
                            ReadDenseTable(step.traits(), table, *new_table, slots, new_slots, &rows));
                        return DenseUpdate(problem, MakePool(threads), rows, g, step, weight_data, applied_data);
                      }),
      "embed_bag_update");
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

}  // namespace jax_tt
