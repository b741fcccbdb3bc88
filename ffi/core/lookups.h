// The lookups of a batch as the kernels of every platform are given them.
#pragma once

#include <stdint.h>

#include <string_view>

#include "ffi/core/host_device.h"

namespace jax_tt {

// What an id outside [0, num_embeddings) does.  kUnchecked promises there is none; memory safety then clamps.  kPoison
// makes its bag NaN: an error of one device alone would leave the others waiting for it in the next collective.  kWarn
// is kZero and a report.
enum class Bounds : int64_t { kClip = 0, kZero = 1, kError = 2, kUnchecked = 3, kPoison = 4, kWarn = 5 };
constexpr const char* kBoundsNames[] = {"clip", "zero", "error", "unchecked", "poison", "warn"};

struct Notice;

enum class IdType { kInt32, kUint32, kInt64, kDigits };

// The lookups of a batch: `groups` independent blocks of `capacity` ids and `bags` bags each.
struct Lookups {
  IdType type = IdType::kInt32;
  const void* ids = nullptr;         // [groups, capacity], digits: int32 [groups, capacity, d]
  const int32_t* offsets = nullptr;  // [groups, bags + 1], last one included
  int64_t groups = 0, capacity = 0, bags = 0;
  int64_t words_per_id = 1;  // of 32 bits
  bool padded = false;       // an id with all bits set is padding
  Bounds bounds = Bounds::kError;
  std::string_view table;    // named in errors
  Notice* notice = nullptr;  // where kernels of a GPU leave what kWarn finds

  JAX_TT_INLINE int64_t size() const { return groups * capacity; }
};

}  // namespace jax_tt
