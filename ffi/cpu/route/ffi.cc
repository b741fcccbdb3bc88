// FFI handler of routes to rows of other devices.
#include <limits>

#include "ffi/common/args.h"
#include "ffi/common/ffi_util.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/route/route.h"

namespace jax_tt {
namespace {

Status ReadRequests(const ffi::Dictionary& attrs, const ffi::AnyBuffer& device, const ffi::AnyBuffer& row,
                    RouteRequests* requests) {
  requests->n = Count(device);
  JAX_TT_RETURN_IF_ERROR(CheckIds(requests->n));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "devices", &requests->devices));
  if (requests->devices < 1 || requests->devices >= std::numeric_limits<int32_t>::max())
    return InvalidArgument("devices must be from 1 to 2^31 - 2");
  JAX_TT_RETURN_IF_ERROR(Data(device, "device", -1, &requests->device));
  return Data(row, "row", requests->n, &requests->row);
}

ffi::Error DistinctImpl(ffi::AnyBuffer device, ffi::AnyBuffer row, ffi::Result<ffi::AnyBuffer> found_device,
                        ffi::Result<ffi::AnyBuffer> found_row, ffi::Result<ffi::AnyBuffer> source,
                        ffi::Result<ffi::AnyBuffer> places, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    RouteRequests requests = {};
    DistinctRoute found = {};
    JAX_TT_RETURN_IF_ERROR(ReadRequests(attrs, device, row, &requests));
    JAX_TT_RETURN_IF_ERROR(Data(*found_device, "found_device", requests.n, &found.device));
    JAX_TT_RETURN_IF_ERROR(Data(*found_row, "found_row", requests.n, &found.row));
    JAX_TT_RETURN_IF_ERROR(Data(*source, "source", requests.n, &found.source));
    JAX_TT_RETURN_IF_ERROR(Data(*places, "places", requests.n, &found.places));
    return DistinctRows(requests, found);
  };
  return ToError(run(), "route_distinct");
}

ffi::Error BagsImpl(ffi::AnyBuffer device, ffi::AnyBuffer row, ffi::AnyBuffer bag, ffi::Result<ffi::AnyBuffer> rows,
                    ffi::Result<ffi::AnyBuffer> source, ffi::Result<ffi::AnyBuffer> offsets,
                    ffi::Result<ffi::AnyBuffer> most, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    RouteRequests requests = {};
    BagRoute found = {};
    const int32_t* bags;
    JAX_TT_RETURN_IF_ERROR(ReadRequests(attrs, device, row, &requests));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "size", &found.size));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "bags", &found.bags));
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (found.size < 0 || found.size > kMost || found.bags < 0 || found.bags > kMost)
      return InvalidArgument("a device has at most 2^31 - 1 places and as many bags");
    JAX_TT_RETURN_IF_ERROR(Data(bag, "bag", requests.n, &bags));
    JAX_TT_RETURN_IF_ERROR(Data(*rows, "rows", requests.devices * found.size, &found.rows));
    JAX_TT_RETURN_IF_ERROR(Data(*source, "source", requests.devices * found.size, &found.source));
    JAX_TT_RETURN_IF_ERROR(Data(*offsets, "offsets", requests.devices * (found.bags + 1), &found.offsets));
    JAX_TT_RETURN_IF_ERROR(Data(*most, "most", 1, &found.most));
    return RouteBags(requests, bags, found);
  };
  return ToError(run(), "route_bags");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteBagsCpu, BagsImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // device s32 [n]
                                  .Arg<ffi::AnyBuffer>()  // row s32 [n]
                                  .Arg<ffi::AnyBuffer>()  // bag s32 [n]
                                  .Ret<ffi::AnyBuffer>()  // rows s32 [devices, size]
                                  .Ret<ffi::AnyBuffer>()  // source s32 [devices, size]
                                  .Ret<ffi::AnyBuffer>()  // offsets s32 [devices, bags + 1]
                                  .Ret<ffi::AnyBuffer>()  // most s32 [1]
                                  .Attrs());

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
