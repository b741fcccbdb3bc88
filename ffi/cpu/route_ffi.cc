// FFI handler of routes to rows of other devices.
#include <limits>

#include "ffi/common/args.h"
#include "ffi/common/ffi_util.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/route.h"

namespace jax_tt {
namespace {

ffi::Error DistinctImpl(ffi::AnyBuffer device, ffi::AnyBuffer row, ffi::Result<ffi::AnyBuffer> found_device,
                        ffi::Result<ffi::AnyBuffer> found_row, ffi::Result<ffi::AnyBuffer> source,
                        ffi::Result<ffi::AnyBuffer> places, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    RouteRequests requests = {};
    DistinctRoute found = {};
    requests.n = Count(device);
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "devices", &requests.devices));
    if (requests.devices < 1 || requests.devices >= std::numeric_limits<int32_t>::max())
      return InvalidArgument("devices must be at least 1");
    JAX_TT_RETURN_IF_ERROR(Data(device, "device", -1, &requests.device));
    JAX_TT_RETURN_IF_ERROR(Data(row, "row", requests.n, &requests.row));
    JAX_TT_RETURN_IF_ERROR(Data(*found_device, "found_device", requests.n, &found.device));
    JAX_TT_RETURN_IF_ERROR(Data(*found_row, "found_row", requests.n, &found.row));
    JAX_TT_RETURN_IF_ERROR(Data(*source, "source", requests.n, &found.source));
    JAX_TT_RETURN_IF_ERROR(Data(*places, "places", requests.n, &found.places));
    return DistinctRows(requests, found);
  };
  return ToError(run(), "route_distinct");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteDistinctCpu, DistinctImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // device s32 [n]
                                  .Arg<ffi::AnyBuffer>()  // row s32 [n]
                                  .Ret<ffi::AnyBuffer>()  // device s32 [n]
                                  .Ret<ffi::AnyBuffer>()  // row s32 [n]
                                  .Ret<ffi::AnyBuffer>()  // source s32 [n]
                                  .Ret<ffi::AnyBuffer>()  // places s32 [n]
                                  .Attrs());

}  // namespace jax_tt
