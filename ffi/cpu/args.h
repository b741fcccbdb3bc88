// Arguments shared by several CPU handlers.
#pragma once

#include <stdint.h>

#include <initializer_list>
#include <optional>
#include <string_view>

#include "ffi/common/args.h"
#include "ffi/cpu/huge_pages.h"
#include "ffi/cpu/pool.h"
#include "ffi/cpu/row_update.h"

namespace jax_tt {

// The same for new results of an op.
inline void PreferHugePages(std::initializer_list<ffi::AnyBuffer> results) {
  for (const ffi::AnyBuffer& result : results)
    PreferHugePages(result.untyped_data(), static_cast<int64_t>(result.size_bytes()));
}

// Fails if the sentinel shows that the table was changed by something other than its own update.
Status CheckSentinel(const ffi::AnyBuffer& sentinel, std::string_view table);

// The step with its numbers, which a handler of the CPU can read.
template <typename C>
Status ReadStep(const StepArgs& args, OptimizerStep<C>* step) {
  const C* scale = nullptr;
  JAX_TT_RETURN_IF_ERROR(args.Numbers(&step->hyper, &scale));
  step->kind = args.kind;
  step->traits = args.traits();
  step->exported = ExportedOf(args.kind);
  step->skip_nonfinite = args.skip_nonfinite;
  step->stochastic_rounding = args.stochastic_rounding;
  step->gradient_scale = scale[0];
  step->allowed = scale[1] != C{0};
  step->seed[0] = args.seed[0];
  step->seed[1] = args.seed[1];
  return {};
}

// What a handler knows of the threads that it may use.
struct OpThreads {
  ffi::ThreadPool pool;
  int32_t device;
};

// The devices of a process share one pool: each op takes the part of its device.
Pool MakePool(OpThreads threads);

}  // namespace jax_tt

template <>
struct xla::ffi::CtxDecoding<jax_tt::OpThreads> {
  using Type = jax_tt::OpThreads;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    const auto pool = CtxDecoding<ThreadPool>::Decode(api, ctx, diagnostic);
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, ctx, diagnostic);
    if (!pool || !device) return std::nullopt;
    return Type{*pool, *device};
  }
};
