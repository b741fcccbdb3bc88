// Cores and slots of a TT table among the arguments and results of a handler.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "ffi/common/args.h"
#include "ffi/core/optimizers/slot_arrays.h"

namespace jax_tt {

using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;

// The d arguments from `first` on, as pointers to cores of this shape.
template <typename T, typename Pointer>
Status ReadCores(const TTShape& shape, const Args& args, size_t first, Pointer* cores) {
  for (int k = 0; k < shape.d; ++k) {
    auto buffer = args.get<ffi::AnyBuffer>(first + static_cast<size_t>(k));
    if (!buffer.has_value()) return InvalidArgument("a core is missing");
    JAX_TT_RETURN_IF_ERROR(Data(*buffer, "core", shape.core_size(k), &cores[k]));
  }
  return {};
}

// Storage type of the table whose cores start at argument `first`.
template <typename F>
Status DispatchCores(const Args& args, size_t first, F&& body) {
  auto core = args.get<ffi::AnyBuffer>(first);
  if (!core.has_value()) return InvalidArgument("a core is missing");
  return DispatchStorage(core->element_type(), std::forward<F>(body));
}

// A slot of a table of `rows` rows of `width` elements that are computed in type C, which an update changes in place.
template <typename C>
Status ReadSlot(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out, const OptimizerTraits& traits, int slot,
                int64_t rows, int64_t width, SlotArrays* slots) {
  const auto read = [&](auto* data) -> Status {
    JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(in, out, "slot", rows * traits.slot_width(slot, width), &data));
    slots->data[slot] = data;
    return {};
  };
  if (slot >= traits.element_slots) return read(static_cast<C*>(nullptr));
  const bool narrow = in.element_type() == ffi::DataType::BF16;
  if (slot > 0 && narrow != slots->narrow)
    return InvalidArgument("slots with a number per element must have the same type");
  slots->narrow = narrow;
  return narrow ? read(static_cast<bfloat16*>(nullptr)) : read(static_cast<C*>(nullptr));
}

// The type in which the rows of a table are computed.
template <typename Table>
using ComputeOf = typename ComputeType<std::remove_pointer_t<decltype(Table::values)>>::type;

// Cores and slots that an update changes in place: the results from `first_ret` on must be the arguments from
// `first_arg` on.
template <typename Table>
Status ReadTables(const TTShape& shape, const OptimizerTraits& traits, const Args& args, size_t first_arg,
                  const Rets& rets, size_t first_ret, Table* tables) {
  const auto with = [&](size_t index, std::string_view name, auto read) -> Status {
    auto in = args.get<ffi::AnyBuffer>(first_arg + index);
    auto out = rets.get<ffi::AnyBuffer>(first_ret + index);
    if (!in.has_value() || !out.has_value()) return InvalidArgument(std::string(name) + " is missing");
    return read(*in, **out);
  };
  for (int k = 0; k < shape.d; ++k) {
    Table& table = tables[k];
    table.width = shape.slice_size(k);
    table.stream = static_cast<uint64_t>(k);
    JAX_TT_RETURN_IF_ERROR(with(static_cast<size_t>(k), "core", [&](const auto& in, const auto& out) {
      return UpdatedInPlace(in, out, "core", shape.core_size(k), &table.values);
    }));
    for (int s = 0; s < traits.slots(); ++s)
      JAX_TT_RETURN_IF_ERROR(
          with(static_cast<size_t>(shape.d + k * traits.slots() + s), "slot", [&](const auto& in, const auto& out) {
            return ReadSlot<ComputeOf<Table>>(in, out, traits, s, shape.p[k], shape.slice_size(k), &table.slots);
          }));
  }
  return {};
}

// The slots of a dense table as arguments and as results.
struct SlotBuffers {
  std::vector<ffi::AnyBuffer> in, out;
};

// A dense table and its slots, which an update changes in place.
template <typename Table>
Status ReadDenseTable(const OptimizerTraits& traits, const ffi::AnyBuffer& in, const ffi::AnyBuffer& out,
                      const SlotBuffers& slots, Table* table) {
  const int64_t rows = in.dimensions()[0], width = in.dimensions()[1];
  JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(in, out, "table", Count(in), &table->values));
  for (size_t s = 0; s < slots.in.size(); ++s)
    JAX_TT_RETURN_IF_ERROR(
        ReadSlot<ComputeOf<Table>>(slots.in[s], slots.out[s], traits, static_cast<int>(s), rows, width, &table->slots));
  return {};
}

}  // namespace jax_tt
