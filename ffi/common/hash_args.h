// Arguments of the ops of hash tables as the handlers of every platform read them.
#ifndef JAX_TT_COMMON_HASH_ARGS_H_
#define JAX_TT_COMMON_HASH_ARGS_H_

#include <cstdint>
#include <limits>

#include "ffi/common/args.h"
#include "ffi/common/ffi_util.h"
#include "ffi/core/hash.h"

namespace jax_tt {

template <>
inline constexpr ffi::DataType kDataType<bool> = ffi::DataType::PRED;

// Sizes and last batches: touched [sets, ways].
inline Status ReadHashShape(const ffi::AnyBuffer& touched, HashDirectory* directory) {
  if (touched.dimensions().size() != 2) return InvalidArgument("touched must have two axes");
  directory->sets = touched.dimensions()[0];
  directory->ways = touched.dimensions()[1];
  if (Count(touched) < 1 || Count(touched) > std::numeric_limits<int32_t>::max() || directory->ways > kMaxHashWays)
    return InvalidArgument("a table has 1 to 2^31 - 1 slots in sets of at most 64");
  return Data(touched, "touched", -1, &directory->touched);
}

// The keys of a call, and whether each position counts: keys [..., 2], present [...].
inline Status ReadHashBatch(const ffi::AnyBuffer& keys, const ffi::AnyBuffer& present, int64_t* n,
                            const uint32_t** keys_data, const bool** present_data) {
  *n = Count(present);
  if (*n > std::numeric_limits<int32_t>::max()) return InvalidArgument("one call takes at most 2^31 - 1 keys");
  JAX_TT_RETURN_IF_ERROR(Data(present, "present", -1, present_data));
  return Data(keys, "keys of the batch", 2 * *n, keys_data);
}

inline Status ReadHashPolicy(const ffi::Dictionary& attrs, HashPolicy* policy, int64_t* min_age) {
  int64_t value = 0;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "policy", &value));
  if (value < 0 || value > static_cast<int64_t>(HashPolicy::kCustom)) return InvalidArgument("unknown policy");
  *policy = static_cast<HashPolicy>(value);
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "min_age", min_age));
  if (*min_age < 1) return InvalidArgument("min_age must be at least 1");
  return {};
}

}  // namespace jax_tt

#endif  // JAX_TT_COMMON_HASH_ARGS_H_
