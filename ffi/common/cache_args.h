// Arguments of the row cache's ops as the handlers of every platform read them.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

#include "ffi/common/args.h"
#include "ffi/common/ffi_util.h"
#include "ffi/core/cache.h"

namespace jax_tt {

template <>
inline constexpr ffi::DataType kDataType<int64_t> = ffi::DataType::S64;

// Calls body(TypeTag<K>) with the type of the ids.
template <typename F>
Status DispatchCacheKey(ffi::DataType dtype, F&& body) {
  if (dtype == ffi::DataType::S32) return body(TypeTag<int32_t>{});
  if (dtype == ffi::DataType::S64) return body(TypeTag<int64_t>{});
  return InvalidArgument("ids must be int32 or int64");
}

// The ids of a batch; their number fits in an int32.
template <typename K>
Status ReadCacheKeys(const ffi::AnyBuffer& keys, int64_t* n, const K** data) {
  *n = Count(keys);
  if (*n > std::numeric_limits<int32_t>::max()) return InvalidArgument("one call takes at most 2^31 - 1 ids");
  return Data(keys, "keys", -1, data);
}

// Sizes and ids of the cached rows: tags [sets, ways].
template <typename K>
Status ReadCacheTags(const ffi::AnyBuffer& tags, CacheShape* shape, const K** data) {
  if (tags.dimensions().size() != 2) return InvalidArgument("tags must have two axes");
  shape->sets = tags.dimensions()[0];
  shape->ways = tags.dimensions()[1];
  if (Count(tags) < 1 || Count(tags) > std::numeric_limits<int32_t>::max())
    return InvalidArgument("a cache has 1 to 2^31 - 1 slots");
  return Data(tags, "tags", -1, data);
}

// Sizes and ids of the ghosts: ghost_tags [buckets, room], after ReadCacheTags.
inline Status ReadGhostShape(const ffi::AnyBuffer& ghost_tags, CacheShape* shape) {
  if (ghost_tags.dimensions().size() != 2) return InvalidArgument("ghost tags must have two axes");
  shape->buckets = ghost_tags.dimensions()[0];
  shape->room = ghost_tags.dimensions()[1];
  if (Count(ghost_tags) < 1 || shape->buckets > std::numeric_limits<int32_t>::max() ||
      shape->buckets % shape->sets != 0 || shape->ghosts_per_set() > std::numeric_limits<int32_t>::max())
    return InvalidArgument(
        "every set must have as many buckets of ghosts, 1 to 2^31 - 1 places in them, and all sets "
        "at most 2^31 - 1 buckets");
  return {};
}

// An argument of a cache op and the result that takes its place.
struct CacheInPlace {
  const ffi::AnyBuffer& in;
  const ffi::AnyBuffer& out;

  template <typename T>
  Status Read(std::string_view name, int64_t count, T** data) const {
    return UpdatedInPlace(in, out, name, count, data);
  }
};

// What both observe and populate update in place, after shape is read.
template <typename K>
Status ReadCacheState(const ffi::AnyBuffer& clock, CacheInPlace scores, CacheInPlace touched, CacheInPlace ghost_tags,
                      CacheInPlace ghost_scores, CacheInPlace ghost_touched, CacheInPlace ghost_recent,
                      CacheDirectory<K>* directory) {
  CacheShape& shape = directory->shape;
  JAX_TT_RETURN_IF_ERROR(ReadGhostShape(ghost_tags.in, &shape));
  const int64_t slots = shape.slots(), ghosts = shape.buckets * shape.room;
  JAX_TT_RETURN_IF_ERROR(Data(clock, "clock", 1, &directory->clock));
  JAX_TT_RETURN_IF_ERROR(scores.Read("scores", slots, &directory->scores));
  JAX_TT_RETURN_IF_ERROR(touched.Read("touched", slots, &directory->touched));
  JAX_TT_RETURN_IF_ERROR(ghost_tags.Read("ghost tags", ghosts, &directory->ghost_tags));
  JAX_TT_RETURN_IF_ERROR(ghost_scores.Read("ghost scores", ghosts, &directory->ghost_scores));
  JAX_TT_RETURN_IF_ERROR(ghost_touched.Read("ghost touched", ghosts, &directory->ghost_touched));
  return ghost_recent.Read("ghost recent", ghosts, &directory->ghost_recent);
}

inline Status ReadCachePolicy(const ffi::Dictionary& attrs, CachePolicy* policy) {
  return ReadNamed(attrs, "policy", kCachePolicyNames, policy);
}

}  // namespace jax_tt
