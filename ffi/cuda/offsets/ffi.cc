// FFI handler of the offsets of bags on the GPU: shapes and types are checked here, launches are elsewhere.
#include "ffi/common/bag_offsets.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/offsets/offsets.h"
#include "ffi/cuda/stream.h"

namespace jax_tt {
namespace {

ffi::Error OffsetsImpl(cudaStream_t stream, ffi::AnyBuffer capacities, Args args, ffi::Result<ffi::AnyBuffer> refused,
                       Rets rets, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    BagOffsetsCall call;
    JAX_TT_RETURN_IF_ERROR(ReadBagOffsets(capacities, args, *refused, rets, attrs, &call));
    return EnterBagOffsets(stream, call);
  };
  return ToError(run(), "bag_offsets");
}

}  // namespace

// As on the CPU (ffi/cpu/offsets/ffi.cc), with the stream; nothing is raised or said.
XLA_FFI_DEFINE_HANDLER_SYMBOL(BagOffsetsCuda, OffsetsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_tt
