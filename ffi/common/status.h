// The outcome of a launch, before the boundary turns it into an XLA error.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace jax_tt {

enum class Code { kOk, kInvalidArgument, kOutOfRange, kResourceExhausted, kInternal };

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
};

inline Status InvalidArgument(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }
inline Status OutOfRange(std::string message) { return {Code::kOutOfRange, std::move(message)}; }
inline Status ResourceExhausted(std::string message) { return {Code::kResourceExhausted, std::move(message)}; }
inline Status Internal(std::string message) { return {Code::kInternal, std::move(message)}; }

inline Status CheckCount(std::string_view name, int64_t got, int64_t expected) {
  if (got == expected) return {};
  return InvalidArgument(std::string(name) + " has " + std::to_string(got) + " elements, expected " +
                         std::to_string(expected));
}

// The status with the name of the table, where it does not say it.
inline Status Named(Status status, std::string_view table) {
  if (!status.ok() && !table.empty() && status.message.find(table) == std::string::npos)
    status.message = "table '" + std::string(table) + "': " + status.message;
  return status;
}

#define JAX_TT_RETURN_IF_ERROR(expr)                                  \
  if (::jax_tt::Status jax_tt_status = (expr); !jax_tt_status.ok()) { \
    return jax_tt_status;                                             \
  }

}  // namespace jax_tt
