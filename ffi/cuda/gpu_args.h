// Arguments and results that only the handlers of the GPU have.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "ffi/common/args.h"

namespace jax_tt {

// As DispatchStorage, for the storage types that the GPU takes.
template <typename F>
Status DispatchGpuStorage(ffi::DataType dtype, F&& body) {
  return DispatchStorage(dtype, [&](auto tag) -> Status {
    if constexpr (std::is_same_v<typename decltype(tag)::type, double>)
      return InvalidArgument("float64 tables are not supported on a GPU; use float32, bfloat16 or float16");
    else
      return body(tag);
  });
}

// The memory that a handler works in, since it must not allocate any.
inline Status ReadWorkspace(const ffi::AnyBuffer& buffer, int64_t bytes, void** workspace) {
  if (static_cast<int64_t>(buffer.size_bytes()) < bytes)
    return InvalidArgument("the workspace has " + std::to_string(buffer.size_bytes()) + " bytes, expected " +
                           std::to_string(bytes));
  *workspace = buffer.untyped_data();
#if defined(JAX_TT_EMULATION)
  // NaN as a float, -1 as an integer: what is read before it was written shows.
  if (buffer.size_bytes() != 0) memset(*workspace, 0xff, buffer.size_bytes());
#endif
  return {};
}

// The workspace where it is the last of several results.
inline Status LastResult(const ffi::RemainingRets& results, std::optional<ffi::AnyBuffer>* workspace) {
  if (results.size() == 0) return InvalidArgument("the workspace is missing");
  auto buffer = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (!buffer.has_value()) return InvalidArgument("the workspace is missing");
  *workspace = **buffer;
  return {};
}
inline Status ReadLastWorkspace(const ffi::RemainingRets& results, int64_t bytes, void** workspace) {
  std::optional<ffi::AnyBuffer> buffer;
  JAX_TT_RETURN_IF_ERROR(LastResult(results, &buffer));
  return ReadWorkspace(*buffer, bytes, workspace);
}

}  // namespace jax_tt
