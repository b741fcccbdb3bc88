// Which kernels move the elements of a table.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <type_traits>

#include "ffi/core/half.h"
#include "ffi/cuda/dense/dense.h"

namespace jax_tt {

template <typename T>
struct StorageTag {
  using type = T;
};

// Calls body(StorageTag<T>, std::integral_constant<int, V>) for all types of numbers, and V of them at a time.
template <typename Body>
Status ForEachWidth(Body body) {
  const auto of_type = [&](auto storage) -> Status {
    JAX_TT_RETURN_IF_ERROR(body(storage, std::integral_constant<int, 4>{}));
    return body(storage, std::integral_constant<int, 1>{});
  };
  JAX_TT_RETURN_IF_ERROR(of_type(StorageTag<float>{}));
  JAX_TT_RETURN_IF_ERROR(of_type(StorageTag<bfloat16>{}));
  return of_type(StorageTag<float16>{});
}

inline bool IsAligned(const void* place, size_t bytes) { return reinterpret_cast<uintptr_t>(place) % bytes == 0; }

// `vectors`: the output or its gradient.
template <typename Table>
DenseWidths WidthsOf(const Table& table, const float* vectors, int element_slots) {
  constexpr size_t kFloats = 4 * sizeof(float);
  const size_t packet = table.storage == Storage::kFloat32 ? 16 : table.storage == Storage::kPacked ? 4 : 8;
  DenseWidths widths;
  widths.four_wide = table.batch.dim % 4 == 0 && IsAligned(table.values, packet);
  if constexpr (requires { table.slots; })
    for (int s = 0; s < element_slots; ++s) widths.four_wide &= IsAligned(table.slots.data[s], kFloats);
  const BagVectors& of_bags = table.vectors;
  widths.vectors_aligned = IsAligned(vectors, kFloats);
  widths.vectors_aligned &= of_bags.stride % 4 == 0;
  for (int64_t k = 0; k < of_bags.features(table.batch.total_bags()); ++k)
    widths.vectors_aligned &= of_bags.columns[k] % 4 == 0;
  return widths;
}

}  // namespace jax_tt
