// FFI handlers of dense tables.
#include <string_view>

#include "ffi/cpu/args.h"
#include "ffi/cpu/dense.h"
#include "ffi/cpu/handlers.h"

namespace jax_tt {
namespace {

template <typename T>
Status ReadProblem(const ffi::AnyBuffer& ids, const ffi::AnyBuffer& offsets, const ffi::AnyBuffer& weights,
                   const ffi::AnyBuffer& table, bool padded, int64_t bounds, std::string_view name,
                   DenseProblem<T>* problem) {
  if (table.dimensions().size() != 2) return InvalidArgument("a dense table has two axes");
  problem->num_embeddings = table.dimensions()[0];
  problem->dim = table.dimensions()[1];
  JAX_TT_RETURN_IF_ERROR(Data(table, "table", -1, &problem->table));
  JAX_TT_RETURN_IF_ERROR(
      ReadLookups(ids, offsets, /*split=*/false, /*digits=*/1, padded, bounds, name, &problem->lookups));
  if (problem->num_embeddings == 0 && problem->lookups.bounds != Bounds::kError)
    problem->lookups.bounds = Bounds::kZero;
  return OptionalData(weights, "weights", problem->lookups.size(), &problem->weights);
}

template <typename T>
int64_t OutCount(const DenseProblem<T>& problem) {
  return problem.lookups.groups * problem.lookups.bags * problem.dim;
}

ffi::Error ForwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer sentinel, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> out, bool padded,
                       int64_t bounds, std::string_view name) {
  return ToError(DispatchStorage(table.element_type(),
                                 [&](auto tag) -> Status {
                                   using T = typename decltype(tag)::type;
                                   DenseProblem<T> problem;
                                   typename DenseProblem<T>::C* out_data = nullptr;
                                   JAX_TT_RETURN_IF_ERROR(CheckSentinel(sentinel, name));
                                   JAX_TT_RETURN_IF_ERROR(
                                       ReadProblem(ids, offsets, weights, table, padded, bounds, name, &problem));
                                   JAX_TT_RETURN_IF_ERROR(Data(*out, "out", OutCount(problem), &out_data));
                                   return DenseForward(problem, MakePool(threads), out_data);
                                 }),
                 "embed_bag");
}

ffi::Error BackwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                        ffi::AnyBuffer out_gradient, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> weight_gradient,
                        ffi::Result<ffi::AnyBuffer> gradient, bool padded, int64_t bounds, std::string_view name) {
  return ToError(
      DispatchStorage(table.element_type(),
                      [&](auto tag) -> Status {
                        using T = typename decltype(tag)::type;
                        using C = typename DenseProblem<T>::C;
                        DenseProblem<T> problem;
                        const C* g = nullptr;
                        C* gradient_data = nullptr;
                        C* weight_data = nullptr;
                        JAX_TT_RETURN_IF_ERROR(
                            ReadProblem(ids, offsets, weights, table, padded, bounds, name, &problem));
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
                      ffi::Result<ffi::AnyBuffer> new_table, ffi::RemainingRets new_slots, bool padded, int64_t bounds,
                      std::string_view name, int64_t optimizer, bool skip_nonfinite, bool stochastic_rounding) {
  return ToError(
      DispatchStorage(
          table.element_type(),
          [&](auto tag) -> Status {
            using T = typename decltype(tag)::type;
            using C = typename DenseProblem<T>::C;
            DenseProblem<T> problem;
            OptimizerStep step;
            RowTable<T> rows;
            const C* g = nullptr;
            C* weight_data = nullptr;
            float* applied_data = nullptr;
            JAX_TT_RETURN_IF_ERROR(ReadStep(optimizer, hyper, scale, seed, skip_nonfinite, stochastic_rounding, &step));
            JAX_TT_RETURN_IF_ERROR(ReadProblem(ids, offsets, weights, table, padded, bounds, name, &problem));
            JAX_TT_RETURN_IF_ERROR(Data(out_gradient, "out gradient", OutCount(problem), &g));
            JAX_TT_RETURN_IF_ERROR(
                OptionalData(*weight_gradient, "weight gradient", problem.lookups.size(), &weight_data));
            JAX_TT_RETURN_IF_ERROR(Data(*applied, "applied", 1, &applied_data));
            rows.width = problem.dim;
            JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(table, *new_table, "table", Count(table), &rows.values));
            for (int s = 0; s < step.traits().slots(); ++s) {
              auto in = slots.get<ffi::AnyBuffer>(static_cast<size_t>(s));
              auto out = new_slots.get<ffi::AnyBuffer>(static_cast<size_t>(s));
              if (!in.has_value() || !out.has_value()) return InvalidArgument("a slot is missing");
              JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(
                  *in, **out, "slot", step.traits().row_wise ? problem.num_embeddings : Count(table), &rows.slots[s]));
            }
            return DenseUpdate(problem, MakePool(threads), rows, g, step, weight_data, applied_data);
          }),
      "embed_bag_update");
}

}  // namespace

#define JAX_TT_LOOKUP_ATTRS .Attr<bool>("padded").Attr<int64_t>("bounds").Attr<std::string_view>("table")

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
                              JAX_TT_LOOKUP_ATTRS);

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
                              JAX_TT_LOOKUP_ATTRS);

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseUpdateCpu, UpdateImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // result of the forward pass: only to run after it
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // out gradient [G.., B, D]
                                  .Arg<ffi::AnyBuffer>()  // hyper-parameters f32
                                  .Arg<ffi::AnyBuffer>()  // gradient scale f32 []
                                  .Arg<ffi::AnyBuffer>()  // seed u32 [2]
                                  .Arg<ffi::AnyBuffer>()  // table [N, D]
                                  .RemainingArgs()        // slots
                                  .Ret<ffi::AnyBuffer>()  // applied f32 []
                                  .Ret<ffi::AnyBuffer>()  // weight gradient [n], or empty
                                  .Ret<ffi::AnyBuffer>()  // table, in place
                                  .RemainingRets()        // slots, in place
                              JAX_TT_LOOKUP_ATTRS.Attr<int64_t>("optimizer")
                                  .Attr<bool>("skip_nonfinite")
                                  .Attr<bool>("stochastic_rounding"));

}  // namespace jax_tt
