#include "ffi/common/bag_offsets.h"

#include <string>

namespace jax_tt {

Status ReadBagOffsets(const ffi::AnyBuffer& capacities, const Args& args, const ffi::AnyBuffer& refused,
                      const Rets& rets, const ffi::Dictionary& attrs, BagOffsetsCall* call) {
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "mode", &call->mode));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "labels", &call->labels));
  const auto count = static_cast<int64_t>(args.size());
  if (count == 0 || Count(capacities) % count != 0)
    return InvalidArgument("capacities: expected one for each array of offsets");
  call->examples = Count(capacities) / count;
  JAX_TT_RETURN_IF_ERROR(Data(capacities, "capacities", -1, &call->capacities));
  JAX_TT_RETURN_IF_ERROR(Data(refused, "refused", Count(capacities), &call->refused));
  for (size_t k = 0; k < args.size(); ++k) {
    auto in = args.get<ffi::AnyBuffer>(k);
    auto out = rets.get<ffi::AnyBuffer>(k);
    if (!in.has_value() || !out.has_value()) return InvalidArgument("offsets are missing");
    if (in->dimensions().size() == 0 || in->dimensions().back() < 1)
      return InvalidArgument("offsets must hold at least the first one");
    BagOffsets array;
    array.size = in->dimensions().back();
    JAX_TT_RETURN_IF_ERROR(Data(*in, "offsets", call->examples * array.size, &array.given));
    JAX_TT_RETURN_IF_ERROR(Data(**out, "offsets", call->examples * array.size, &array.offsets));
    call->arrays.push_back(array);
  }
  return {};
}

}  // namespace jax_tt
