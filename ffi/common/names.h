// Names that Python calls the values of an enumeration by.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "ffi/common/status.h"

namespace jax_tt {

// The value whose place in the list is that of the name; `what` for errors.
template <typename Value, size_t N>
Status FindName(std::string_view what, const char* const (&names)[N], std::string_view name, Value* value) {
  for (size_t k = 0; k < N; ++k)
    if (name == names[k]) {
      *value = static_cast<Value>(k);
      return {};
    }
  std::string message = std::string(what) + ": got '" + std::string(name) + "'; expected one of";
  for (const char* one : names) message += std::string(" ") + one;
  return InvalidArgument(message);
}

}  // namespace jax_tt
