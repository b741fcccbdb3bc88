// FFI handlers of the row cache on the GPU: shapes and types are checked here, launches are elsewhere.
#include <string>

#include "ffi/common/cache_args.h"
#include "ffi/cuda/cache/cache.h"
#include "ffi/cuda/gpu_args.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/stream.h"

namespace jax_tt {
namespace {

using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error ProbeImpl(cudaStream_t stream, ffi::AnyBuffer tags, ffi::AnyBuffer keys, Result slots,
                     Result /*workspace*/) {
  return ToError(DispatchCacheKey(tags.element_type(),
                                  [&](auto tag) -> Status {
                                    using K = typename decltype(tag)::type;
                                    CacheShape shape;
                                    const K *tag_data = nullptr, *key_data = nullptr;
                                    int64_t n = 0;
                                    int32_t* slot_data = nullptr;
                                    JAX_TT_RETURN_IF_ERROR(ReadCacheTags(tags, &shape, &tag_data));
                                    JAX_TT_RETURN_IF_ERROR(ReadCacheKeys(keys, &n, &key_data));
                                    JAX_TT_RETURN_IF_ERROR(Data(*slots, "slots", n, &slot_data));
                                    return CacheProbe(stream, shape, tag_data, key_data, n, slot_data);
                                  }),
                 "cache_probe");
}

ffi::Error ObserveImpl(cudaStream_t stream, ffi::AnyBuffer keys, ffi::AnyBuffer slots, ffi::AnyBuffer stamp,
                       ffi::AnyBuffer clock, ffi::AnyBuffer tags, ffi::AnyBuffer scores, ffi::AnyBuffer touched,
                       ffi::AnyBuffer ghost_tags, ffi::AnyBuffer ghost_scores, ffi::AnyBuffer ghost_touched,
                       ffi::AnyBuffer ghost_recent, Result counts, Result new_scores, Result new_touched,
                       Result new_ghost_tags, Result new_ghost_scores, Result new_ghost_touched,
                       Result new_ghost_recent, Result workspace, ffi::Dictionary attrs) {
  return ToError(
      DispatchCacheKey(
          tags.element_type(),
          [&](auto tag) -> Status {
            using K = typename decltype(tag)::type;
            CacheDirectory<K> directory;
            CachePolicy policy = CachePolicy::kLfu;
            const K *key_data = nullptr, *tag_data = nullptr;
            const int32_t* slot_data = nullptr;
            int64_t n = 0;
            int32_t* count_data = nullptr;
            void* memory = nullptr;
            JAX_TT_RETURN_IF_ERROR(ReadCachePolicy(attrs, &policy));
            JAX_TT_RETURN_IF_ERROR(ReadCacheTags(tags, &directory.shape, &tag_data));
            JAX_TT_RETURN_IF_ERROR(ReadCacheState(clock, {scores, *new_scores}, {touched, *new_touched},
                                                  {ghost_tags, *new_ghost_tags}, {ghost_scores, *new_ghost_scores},
                                                  {ghost_touched, *new_ghost_touched},
                                                  {ghost_recent, *new_ghost_recent}, &directory));
            JAX_TT_RETURN_IF_ERROR(Data(stamp, "stamp", 1, &directory.stamp));
            JAX_TT_RETURN_IF_ERROR(ReadCacheKeys(keys, &n, &key_data));
            if (n > kMaxCacheIds)
              return InvalidArgument("a GPU counts at most 2^30 ids at once, got " + std::to_string(n));
            JAX_TT_RETURN_IF_ERROR(Data(slots, "slots", n, &slot_data));
            JAX_TT_RETURN_IF_ERROR(Data(*counts, "counts", kCacheCounts, &count_data));
            JAX_TT_RETURN_IF_ERROR(ReadWorkspace(*workspace, CacheObserveWorkspace(n, directory.shape), &memory));
            return CacheObserve(stream, directory, policy, key_data, slot_data, n, count_data, memory);
          }),
      "cache_observe");
}

ffi::Error PopulateImpl(cudaStream_t stream, ffi::AnyBuffer clock, ffi::AnyBuffer tags, ffi::AnyBuffer scores,
                        ffi::AnyBuffer touched, ffi::AnyBuffer ghost_tags, ffi::AnyBuffer ghost_scores,
                        ffi::AnyBuffer ghost_touched, ffi::AnyBuffer ghost_recent, Result evicted, Result counts,
                        Result new_tags, Result new_scores, Result new_touched, Result new_ghost_tags,
                        Result new_ghost_scores, Result new_ghost_touched, Result new_ghost_recent, Result workspace) {
  return ToError(
      DispatchCacheKey(
          tags.element_type(),
          [&](auto tag) -> Status {
            using K = typename decltype(tag)::type;
            CacheDirectory<K> directory;
            const CacheShape& shape = directory.shape;
            const K* tag_data = nullptr;
            K* evicted_data = nullptr;
            int32_t* count_data = nullptr;
            void* memory = nullptr;
            JAX_TT_RETURN_IF_ERROR(ReadCacheTags(tags, &directory.shape, &tag_data));
            JAX_TT_RETURN_IF_ERROR((CacheInPlace{tags, *new_tags}.Read("tags", shape.slots(), &directory.tags)));
            JAX_TT_RETURN_IF_ERROR(ReadCacheState(clock, {scores, *new_scores}, {touched, *new_touched},
                                                  {ghost_tags, *new_ghost_tags}, {ghost_scores, *new_ghost_scores},
                                                  {ghost_touched, *new_ghost_touched},
                                                  {ghost_recent, *new_ghost_recent}, &directory));
            JAX_TT_RETURN_IF_ERROR(Data(*evicted, "evicted", shape.slots(), &evicted_data));
            JAX_TT_RETURN_IF_ERROR(Data(*counts, "counts", kCacheCounts, &count_data));
            JAX_TT_RETURN_IF_ERROR(ReadWorkspace(*workspace, CachePopulateWorkspace(shape), &memory));
            return CachePopulate(stream, directory, evicted_data, count_data, memory);
          }),
      "cache_populate");
}

}  // namespace

// As on the CPU (ffi/cpu/cache/ffi.cc), with the stream for the thread pool and one result more, the workspace.
// n = ids, S x W = the cache, B x R = the ghosts.  K: s32 or s64.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CacheProbeCuda, ProbeImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()   // tags K [S, W]
                                  .Arg<ffi::AnyBuffer>()   // keys K [n]
                                  .Ret<ffi::AnyBuffer>()   // slots s32 [n]
                                  .Ret<ffi::AnyBuffer>(),  // workspace: none is needed
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CacheObserveCuda, ObserveImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // keys K [n]
                                  .Arg<ffi::AnyBuffer>()  // slots s32 [n]
                                  .Arg<ffi::AnyBuffer>()  // stamp s32 []
                                  .Arg<ffi::AnyBuffer>()  // clock s32 []
                                  .Arg<ffi::AnyBuffer>()  // tags K [S, W]
                                  .Arg<ffi::AnyBuffer>()  // scores s32 [S, W]
                                  .Arg<ffi::AnyBuffer>()  // touched s32 [S, W]
                                  .Arg<ffi::AnyBuffer>()  // ghost tags K [B, R]
                                  .Arg<ffi::AnyBuffer>()  // ghost scores s32 [B, R]
                                  .Arg<ffi::AnyBuffer>()  // ghost touched s32 [B, R]
                                  .Arg<ffi::AnyBuffer>()  // ghost recent s32 [B, R]
                                  .Ret<ffi::AnyBuffer>()  // counts s32 [4]
                                  .Ret<ffi::AnyBuffer>()  // the arrays from scores on, in place
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()  // workspace u8 [bytes]
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CachePopulateCuda, PopulateImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // clock s32 []
                                  .Arg<ffi::AnyBuffer>()  // tags K [S, W]
                                  .Arg<ffi::AnyBuffer>()  // scores s32 [S, W]
                                  .Arg<ffi::AnyBuffer>()  // touched s32 [S, W]
                                  .Arg<ffi::AnyBuffer>()  // ghost tags K [B, R]
                                  .Arg<ffi::AnyBuffer>()  // ghost scores s32 [B, R]
                                  .Arg<ffi::AnyBuffer>()  // ghost touched s32 [B, R]
                                  .Arg<ffi::AnyBuffer>()  // ghost recent s32 [B, R]
                                  .Ret<ffi::AnyBuffer>()  // evicted K [S, W]
                                  .Ret<ffi::AnyBuffer>()  // counts s32 [4]
                                  .Ret<ffi::AnyBuffer>()  // the arrays from tags on, in place
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),  // workspace u8 [bytes]
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_tt
