// FFI handlers of the row cache.
#include "ffi/common/cache_args.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/cache/cache.h"
#include "ffi/cpu/handlers.h"

namespace jax_tt {
namespace {

ffi::Error ProbeImpl(OpThreads threads, ffi::AnyBuffer tags, ffi::AnyBuffer keys, ffi::Result<ffi::AnyBuffer> slots) {
  return ToError(DispatchCacheKey(tags.element_type(),
                                  [&](auto tag) -> Status {
                                    using K = typename decltype(tag)::type;
                                    CacheShape shape;
                                    const K *tags_data = nullptr, *keys_data = nullptr;
                                    int32_t* slots_data = nullptr;
                                    int64_t n = 0;
                                    JAX_TT_RETURN_IF_ERROR(ReadCacheTags(tags, &shape, &tags_data));
                                    JAX_TT_RETURN_IF_ERROR(ReadCacheKeys(keys, &n, &keys_data));
                                    JAX_TT_RETURN_IF_ERROR(Data(*slots, "slots", n, &slots_data));
                                    return CacheProbe(shape, tags_data, keys_data, n, MakePool(threads), slots_data);
                                  }),
                 "cache_probe");
}

ffi::Error ObserveImpl(OpThreads threads, ffi::AnyBuffer keys, ffi::AnyBuffer slots, ffi::AnyBuffer stamp,
                       ffi::AnyBuffer clock, ffi::AnyBuffer tags, ffi::AnyBuffer scores, ffi::AnyBuffer touched,
                       ffi::AnyBuffer ghost_tags, ffi::AnyBuffer ghost_scores, ffi::AnyBuffer ghost_touched,
                       ffi::AnyBuffer ghost_recent, ffi::Result<ffi::AnyBuffer> counts,
                       ffi::Result<ffi::AnyBuffer> new_scores, ffi::Result<ffi::AnyBuffer> new_touched,
                       ffi::Result<ffi::AnyBuffer> new_ghost_tags, ffi::Result<ffi::AnyBuffer> new_ghost_scores,
                       ffi::Result<ffi::AnyBuffer> new_ghost_touched, ffi::Result<ffi::AnyBuffer> new_ghost_recent,
                       ffi::Dictionary attrs) {
  return ToError(DispatchCacheKey(
                     tags.element_type(),
                     [&](auto tag) -> Status {
                       using K = typename decltype(tag)::type;
                       CacheDirectory<K> directory;
                       CachePolicy policy = CachePolicy::kLfu;
                       const K *tags_data = nullptr, *keys_data = nullptr;
                       const int32_t* slots_data = nullptr;
                       int32_t* counts_data = nullptr;
                       int64_t n = 0;
                       JAX_TT_RETURN_IF_ERROR(ReadCachePolicy(attrs, &policy));
                       JAX_TT_RETURN_IF_ERROR(ReadCacheTags(tags, &directory.shape, &tags_data));
                       JAX_TT_RETURN_IF_ERROR(ReadCacheState(
                           clock, {scores, *new_scores}, {touched, *new_touched}, {ghost_tags, *new_ghost_tags},
                           {ghost_scores, *new_ghost_scores}, {ghost_touched, *new_ghost_touched},
                           {ghost_recent, *new_ghost_recent}, &directory));
                       JAX_TT_RETURN_IF_ERROR(Data(stamp, "stamp", 1, &directory.stamp));
                       JAX_TT_RETURN_IF_ERROR(ReadCacheKeys(keys, &n, &keys_data));
                       JAX_TT_RETURN_IF_ERROR(Data(slots, "slots", n, &slots_data));
                       JAX_TT_RETURN_IF_ERROR(Data(*counts, "counts", kCacheCounts, &counts_data));
                       return CacheObserve(directory, policy, keys_data, slots_data, n, MakePool(threads), counts_data);
                     }),
                 "cache_observe");
}

ffi::Error PopulateImpl(OpThreads threads, ffi::AnyBuffer clock, ffi::AnyBuffer tags, ffi::AnyBuffer scores,
                        ffi::AnyBuffer touched, ffi::AnyBuffer ghost_tags, ffi::AnyBuffer ghost_scores,
                        ffi::AnyBuffer ghost_touched, ffi::AnyBuffer ghost_recent, ffi::Result<ffi::AnyBuffer> evicted,
                        ffi::Result<ffi::AnyBuffer> counts, ffi::Result<ffi::AnyBuffer> new_tags,
                        ffi::Result<ffi::AnyBuffer> new_scores, ffi::Result<ffi::AnyBuffer> new_touched,
                        ffi::Result<ffi::AnyBuffer> new_ghost_tags, ffi::Result<ffi::AnyBuffer> new_ghost_scores,
                        ffi::Result<ffi::AnyBuffer> new_ghost_touched, ffi::Result<ffi::AnyBuffer> new_ghost_recent) {
  return ToError(
      DispatchCacheKey(
          tags.element_type(),
          [&](auto tag) -> Status {
            using K = typename decltype(tag)::type;
            CacheDirectory<K> directory;
            K* evicted_data = nullptr;
            int32_t* counts_data = nullptr;
            const K* tags_data = nullptr;
            JAX_TT_RETURN_IF_ERROR(ReadCacheTags(tags, &directory.shape, &tags_data));
            JAX_TT_RETURN_IF_ERROR(ReadCacheState(clock, {scores, *new_scores}, {touched, *new_touched},
                                                  {ghost_tags, *new_ghost_tags}, {ghost_scores, *new_ghost_scores},
                                                  {ghost_touched, *new_ghost_touched},
                                                  {ghost_recent, *new_ghost_recent}, &directory));
            JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(tags, *new_tags, "tags", directory.shape.slots(), &directory.tags));
            JAX_TT_RETURN_IF_ERROR(Data(*evicted, "evicted", directory.shape.slots(), &evicted_data));
            JAX_TT_RETURN_IF_ERROR(Data(*counts, "counts", kCacheCounts, &counts_data));
            return CachePopulate(directory, MakePool(threads), evicted_data, counts_data);
          }),
      "cache_populate");
}

}  // namespace

// n = ids of the batch; K = s32 or s64, the type of ids.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CacheProbeCpu, ProbeImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()    // tags K [sets, ways]
                                  .Arg<ffi::AnyBuffer>()    // keys K [n]
                                  .Ret<ffi::AnyBuffer>());  // slots s32 [n]

XLA_FFI_DEFINE_HANDLER_SYMBOL(CacheObserveCpu, ObserveImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // keys K [n]
                                  .Arg<ffi::AnyBuffer>()  // slots s32 [n]
                                  .Arg<ffi::AnyBuffer>()  // stamp s32 []
                                  .Arg<ffi::AnyBuffer>()  // clock s32 []
                                  .Arg<ffi::AnyBuffer>()  // tags K [sets, ways]
                                  .Arg<ffi::AnyBuffer>()  // scores s32 [sets, ways]
                                  .Arg<ffi::AnyBuffer>()  // touched s32 [sets, ways]
                                  .Arg<ffi::AnyBuffer>()  // ghost tags K [buckets, room]
                                  .Arg<ffi::AnyBuffer>()  // ghost scores s32 [buckets, room]
                                  .Arg<ffi::AnyBuffer>()  // ghost touched s32 [buckets, room]
                                  .Arg<ffi::AnyBuffer>()  // ghost recent s32 [buckets, room]
                                  .Ret<ffi::AnyBuffer>()  // counts s32 [4]
                                  .Ret<ffi::AnyBuffer>()  // scores, in place, as all that follow
                                  .Ret<ffi::AnyBuffer>()  // touched
                                  .Ret<ffi::AnyBuffer>()  // ghost tags
                                  .Ret<ffi::AnyBuffer>()  // ghost scores
                                  .Ret<ffi::AnyBuffer>()  // ghost touched
                                  .Ret<ffi::AnyBuffer>()  // ghost recent
                                  .Attrs());              // policy

XLA_FFI_DEFINE_HANDLER_SYMBOL(CachePopulateCpu, PopulateImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()    // clock s32 []
                                  .Arg<ffi::AnyBuffer>()    // tags K [sets, ways]
                                  .Arg<ffi::AnyBuffer>()    // scores s32 [sets, ways]
                                  .Arg<ffi::AnyBuffer>()    // touched s32 [sets, ways]
                                  .Arg<ffi::AnyBuffer>()    // ghost tags K [buckets, room]
                                  .Arg<ffi::AnyBuffer>()    // ghost scores s32 [buckets, room]
                                  .Arg<ffi::AnyBuffer>()    // ghost touched s32 [buckets, room]
                                  .Arg<ffi::AnyBuffer>()    // ghost recent s32 [buckets, room]
                                  .Ret<ffi::AnyBuffer>()    // evicted K [sets, ways]
                                  .Ret<ffi::AnyBuffer>()    // counts s32 [4]
                                  .Ret<ffi::AnyBuffer>()    // tags, in place, as all that follow
                                  .Ret<ffi::AnyBuffer>()    // scores
                                  .Ret<ffi::AnyBuffer>()    // touched
                                  .Ret<ffi::AnyBuffer>()    // ghost tags
                                  .Ret<ffi::AnyBuffer>()    // ghost scores
                                  .Ret<ffi::AnyBuffer>()    // ghost touched
                                  .Ret<ffi::AnyBuffer>());  // ghost recent

}  // namespace jax_tt
