// FFI handler of the offsets of bags as a caller gave them.
#include <algorithm>
#include <string_view>

#include "ffi/common/bag_offsets.h"
#include "ffi/common/reports.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/ids.h"

namespace jax_tt {
namespace {

// The offsets without what is wrong with them: each at or above the one before, at or below the capacity, the first 0.
void Repair(const int32_t* given, int64_t bags, int32_t capacity, int32_t* offsets) {
  int32_t end = offsets[0] = 0;
  for (int64_t b = 1; b <= bags; ++b) offsets[b] = end = std::max(end, std::min(given[b], capacity));
}

// Offsets that give every bag a position, as far as there are enough, and the last one all that are left.
void Spread(int64_t bags, int32_t capacity, int32_t* offsets) {
  for (int64_t b = 0; b < bags; ++b) offsets[b] = static_cast<int32_t>(std::min<int64_t>(b, capacity));
  offsets[bags] = bags > 0 ? capacity : 0;
}

Status Enter(const BagOffsetsCall& call, const BagOffsets& array, int64_t example, size_t k, std::string_view label) {
  const int32_t* given = array.given + example * array.size;
  int32_t* offsets = array.offsets + example * array.size;
  const size_t place = static_cast<size_t>(example) * call.arrays.size() + k;
  const int64_t bags = array.size - 1;
  const int32_t capacity = call.capacities[place];
  const Status status = CheckOffsets(given, 1, bags, capacity, label);
  call.refused[place] = 0;
  if (status.ok()) {
    std::copy_n(given, array.size, offsets);
  } else if (call.mode == "raise") {
    return status;
  } else if (call.mode == "mark") {
    call.refused[place] = 1;
    Spread(bags, std::max(capacity, 0), offsets);
  } else {
    Repair(given, bags, capacity, offsets);
    if (call.mode == "warn") Post({.message = status.message});
  }
  return {};
}

ffi::Error OffsetsImpl(ffi::AnyBuffer capacities, Args args, ffi::Result<ffi::AnyBuffer> refused, Rets rets,
                       ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    BagOffsetsCall call;
    JAX_TT_RETURN_IF_ERROR(ReadBagOffsets(capacities, args, *refused, rets, attrs, &call));
    for (int64_t example = 0; example < call.examples; ++example) {
      std::string_view rest = call.labels;
      for (size_t k = 0; k < call.arrays.size(); ++k) {
        const size_t end = std::min(rest.find('\n'), rest.size());
        JAX_TT_RETURN_IF_ERROR(Enter(call, call.arrays[k], example, k, rest.substr(0, end)));
        rest.remove_prefix(std::min(end + 1, rest.size()));
      }
    }
    return {};
  };
  return ToError(run(), "bag_offsets");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BagOffsetsCpu, OffsetsImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // capacities s32 [..., arrays]
                                  .RemainingArgs()        // offsets s32 [..., bags + 1] of each array
                                  .Ret<ffi::AnyBuffer>()  // refused s32 [..., arrays]
                                  .RemainingRets()        // offsets s32 [..., bags + 1]
                                  .Attrs());

}  // namespace jax_tt
