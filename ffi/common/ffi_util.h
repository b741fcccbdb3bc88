// The only place that knows how errors, shapes and storage types cross the XLA FFI boundary.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "ffi/common/status.h"
#include "ffi/core/half.h"
#include "xla/ffi/api/ffi.h"

namespace jax_tt {

namespace ffi = xla::ffi;

inline ffi::Error ToError(const Status& status, std::string_view op) {
  if (status.ok()) return ffi::Error::Success();
  const ffi::ErrorCode code = status.code == Code::kOutOfRange          ? ffi::ErrorCode::kOutOfRange
                              : status.code == Code::kResourceExhausted ? ffi::ErrorCode::kResourceExhausted
                              : status.code == Code::kInternal          ? ffi::ErrorCode::kInternal
                                                                        : ffi::ErrorCode::kInvalidArgument;
  return ffi::Error(code, std::string(op) + ": " + status.message);
}

// The same of a call whose attribute `caller` names what the user called.
inline ffi::Error ToError(const Status& status, const ffi::Dictionary& attrs) {
  const auto caller = attrs.get<std::string_view>("caller");
  return ToError(status, caller.has_value() ? *caller : "a native call without a caller");
}

inline int64_t Count(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.element_count()); }

template <typename T>
constexpr ffi::DataType kDataType = ffi::DataType::F32;
template <>
inline constexpr ffi::DataType kDataType<double> = ffi::DataType::F64;
template <>
inline constexpr ffi::DataType kDataType<bfloat16> = ffi::DataType::BF16;
template <>
inline constexpr ffi::DataType kDataType<float16> = ffi::DataType::F16;
template <>
inline constexpr ffi::DataType kDataType<int32_t> = ffi::DataType::S32;
template <>
inline constexpr ffi::DataType kDataType<uint32_t> = ffi::DataType::U32;

// Typed access that checks the type and the size; `count` < 0 takes any size.
template <typename T>
Status Data(const ffi::AnyBuffer& buffer, std::string_view name, int64_t count, T** data) {
  if (buffer.element_type() != kDataType<std::remove_const_t<T>>)
    return InvalidArgument(std::string(name) + " has an unexpected element type");
  if (count >= 0) JAX_TT_RETURN_IF_ERROR(CheckCount(name, Count(buffer), count));
  *data = static_cast<T*>(buffer.untyped_data());
  return {};
}

// As Data, but an empty buffer stands for an absent argument and gives null.
template <typename T>
Status OptionalData(const ffi::AnyBuffer& buffer, std::string_view name, int64_t count, T** data) {
  *data = nullptr;
  return Count(buffer) == 0 ? Status{} : Data(buffer, name, count, data);
}

// A result that must be the argument itself, changed in place.
template <typename T>
Status UpdatedInPlace(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out, std::string_view name, int64_t count,
                      T** data) {
  if (in.untyped_data() != out.untyped_data() && count > 0)
    return InvalidArgument(std::string(name) + " must be updated in place");
  JAX_TT_RETURN_IF_ERROR(CheckCount(name, Count(in), count));
  return Data(out, name, count, data);
}

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls body(TypeTag<T>) with the storage type of a table.
template <typename F>
Status DispatchStorage(ffi::DataType dtype, F&& body) {
  switch (dtype) {
    case ffi::DataType::F32:
      return body(TypeTag<float>{});
    case ffi::DataType::F64:
      return body(TypeTag<double>{});
    case ffi::DataType::BF16:
      return body(TypeTag<bfloat16>{});
    case ffi::DataType::F16:
      return body(TypeTag<float16>{});
    default:
      return InvalidArgument("tables must be float32, float64, bfloat16 or float16");
  }
}

}  // namespace jax_tt
