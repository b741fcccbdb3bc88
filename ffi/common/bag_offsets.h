// Reads the call that looks at the offsets of bags.
#pragma once

#include "ffi/common/table_args.h"
#include "ffi/core/bag_offsets.h"

namespace jax_tt {

Status ReadBagOffsets(const ffi::AnyBuffer& capacities, const Args& args, const ffi::AnyBuffer& refused,
                      const Rets& rets, const ffi::Dictionary& attrs, BagOffsetsCall* call);

}  // namespace jax_tt
