// FFI handlers of hash tables on the GPU: shapes and types are checked here, launches are elsewhere.
#include <string>

#include "ffi/common/hash_args.h"
#include "ffi/cuda/gpu_args.h"
#include "ffi/cuda/hash.h"
#include "ffi/cuda/hash_handlers.h"
#include "ffi/cuda/stream.h"

namespace jax_tt {
namespace {

using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error FindImpl(cudaStream_t stream, ffi::AnyBuffer keys, ffi::AnyBuffer touched, ffi::AnyBuffer asked,
                    ffi::AnyBuffer present, Result slots) {
  const auto run = [&]() -> Status {
    HashDirectory directory;
    HashBatch batch;
    int32_t* slot_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadHashShape(touched, &directory));
    JAX_TT_RETURN_IF_ERROR(Data(keys, "keys", 2 * directory.capacity(), &directory.keys));
    JAX_TT_RETURN_IF_ERROR(ReadHashBatch(asked, present, &batch));
    JAX_TT_RETURN_IF_ERROR(Data(*slots, "slots", batch.n, &slot_data));
    return HashFind(stream, directory, batch, slot_data);
  };
  return ToError(run(), "hash_find");
}

ffi::Error InsertImpl(cudaStream_t stream, ffi::AnyBuffer asked, ffi::AnyBuffer present, ffi::AnyBuffer given,
                      ffi::AnyBuffer now, ffi::AnyBuffer epoch, ffi::AnyBuffer keys, ffi::AnyBuffer scores,
                      ffi::AnyBuffer touched, Result slots, Result inserted, Result old_keys, Result old_scores,
                      Result old_touched, Result counts, Result new_keys, Result new_scores, Result new_touched,
                      Result workspace, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    HashDirectory directory;
    HashRequests requests;
    HashInsertion done;
    void* memory = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadHashPolicy(attrs, &requests.policy, &requests.min_age));
    JAX_TT_RETURN_IF_ERROR(ReadHashInPlace({keys, scores, touched, *new_keys, *new_scores, *new_touched}, &directory));
    JAX_TT_RETURN_IF_ERROR(ReadHashBatch(asked, present, &requests.batch));
    const int64_t n = requests.batch.n;
    if (n > kMaxHashKeys) return InvalidArgument("a GPU inserts at most 2^30 keys at once, got " + std::to_string(n));
    JAX_TT_RETURN_IF_ERROR(Data(given, "given", 2 * n, &requests.given));
    JAX_TT_RETURN_IF_ERROR(Data(now, "now", 1, &requests.now));
    JAX_TT_RETURN_IF_ERROR(Data(epoch, "epoch", 1, &requests.epoch));
    JAX_TT_RETURN_IF_ERROR(
        ReadHashInsertion({*slots, *inserted, *old_keys, *old_scores, *old_touched, *counts}, n, &done));
    JAX_TT_RETURN_IF_ERROR(ReadWorkspace(*workspace, HashInsertWorkspace(directory, n), &memory));
    return HashInsert(stream, directory, requests, done, memory);
  };
  return ToError(run(), "hash_insert");
}

ffi::Error InitialImpl(cudaStream_t stream, ffi::AnyBuffer seed, ffi::AnyBuffer quantiles, ffi::AnyBuffer scale,
                       ffi::AnyBuffer keys, ffi::AnyBuffer wanted, Result rows, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    InitialValues values;
    HashBatch batch;
    JAX_TT_RETURN_IF_ERROR(Data(seed, "seed", 2, &values.seed));
    JAX_TT_RETURN_IF_ERROR(Data(quantiles, "quantiles", kQuantiles, &values.quantiles));
    JAX_TT_RETURN_IF_ERROR(Data(scale, "scale", 1, &values.scale));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "signed", &values.with_sign));
    JAX_TT_RETURN_IF_ERROR(ReadHashBatch(keys, wanted, &batch));
    if (rows->dimensions().size() != 2) return InvalidArgument("rows must have two axes");
    const int64_t features = rows->dimensions()[1];
    return DispatchGpuStorage(rows->element_type(), [&](auto tag) -> Status {
      typename decltype(tag)::type* rows_data = nullptr;
      JAX_TT_RETURN_IF_ERROR(Data(*rows, "rows", batch.n * features, &rows_data));
      return HashInitial(stream, values, batch, features, rows_data);
    });
  };
  return ToError(run(), "hash_initial");
}

ffi::Error ExchangeImpl(cudaStream_t stream, ffi::AnyBuffer slots, ffi::RemainingArgs args,
                        ffi::RemainingRets results) {
  const auto run = [&]() -> Status {
    HashSlots places;
    std::vector<HashArray> arrays;
    JAX_TT_RETURN_IF_ERROR(Data(slots, "slots", -1, &places.slots));
    places.n = Count(slots);
    JAX_TT_RETURN_IF_ERROR(ReadHashArrays(args, results, places.n, &places.capacity, &arrays));
    return HashExchange(stream, arrays, places);
  };
  return ToError(run(), "hash_exchange");
}

ffi::Error DoubleImpl(cudaStream_t stream, ffi::AnyBuffer keys, ffi::AnyBuffer scores, ffi::AnyBuffer touched,
                      ffi::RemainingArgs args, Result new_keys, Result new_scores, Result new_touched,
                      ffi::RemainingRets results) {
  const auto run = [&]() -> Status {
    HashDirectory before, after;
    std::vector<HashGrown> arrays;
    void* memory = nullptr;
    JAX_TT_RETURN_IF_ERROR(
        ReadHashDoubled({keys, scores, touched, *new_keys, *new_scores, *new_touched}, &before, &after));
    JAX_TT_RETURN_IF_ERROR(ReadHashGrown(args, results, before.capacity(), &arrays));
    JAX_TT_RETURN_IF_ERROR(ReadLastWorkspace(results, HashDoubleWorkspace(before), &memory));
    return HashDouble(stream, before, after, arrays, memory);
  };
  return ToError(run(), "hash_double");
}

}  // namespace

// As on the CPU (ffi/cpu/hash_ffi.cc), with the stream for the thread pool, and where an op needs it one result more,
// the workspace.  n = keys of the batch.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HashFindCuda, FindImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()   // keys u32 [sets, 2, ways]
                                  .Arg<ffi::AnyBuffer>()   // touched s32 [sets, ways]
                                  .Arg<ffi::AnyBuffer>()   // keys of the batch u32 [n, 2]
                                  .Arg<ffi::AnyBuffer>()   // present pred [n]
                                  .Ret<ffi::AnyBuffer>(),  // slots s32 [n]
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashInsertCuda, InsertImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // keys of the batch u32 [n, 2]
                                  .Arg<ffi::AnyBuffer>()  // present pred [n]
                                  .Arg<ffi::AnyBuffer>()  // given u32 [n, 2]
                                  .Arg<ffi::AnyBuffer>()  // now s32 []
                                  .Arg<ffi::AnyBuffer>()  // epoch u32 []
                                  .Arg<ffi::AnyBuffer>()  // keys u32 [sets, 2, ways]
                                  .Arg<ffi::AnyBuffer>()  // scores u32 [sets, 2, ways]
                                  .Arg<ffi::AnyBuffer>()  // touched s32 [sets, ways]
                                  .Ret<ffi::AnyBuffer>()  // slots s32 [n]
                                  .Ret<ffi::AnyBuffer>()  // inserted u32 [n, 2]
                                  .Ret<ffi::AnyBuffer>()  // old keys u32 [n, 2]
                                  .Ret<ffi::AnyBuffer>()  // old scores u32 [n, 2]
                                  .Ret<ffi::AnyBuffer>()  // old touched s32 [n]
                                  .Ret<ffi::AnyBuffer>()  // counts s32 [7]
                                  .Ret<ffi::AnyBuffer>()  // keys, in place
                                  .Ret<ffi::AnyBuffer>()  // scores, in place
                                  .Ret<ffi::AnyBuffer>()  // touched, in place
                                  .Ret<ffi::AnyBuffer>()  // workspace u8 [bytes]
                                  .Attrs(),               // policy, min_age
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashInitialCuda, InitialImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // seed u32 [2]
                                  .Arg<ffi::AnyBuffer>()  // quantiles s32 [32, 129]
                                  .Arg<ffi::AnyBuffer>()  // scale f32 []
                                  .Arg<ffi::AnyBuffer>()  // keys u32 [n, 2]
                                  .Arg<ffi::AnyBuffer>()  // wanted pred [n]
                                  .Ret<ffi::AnyBuffer>()  // rows [n, features]
                                  .Attrs(),               // signed
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashExchangeCuda, ExchangeImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // slots s32 [n]
                                  .RemainingArgs()        // arrays [capacity, ...], then new entries [n, ...] or []
                                  .RemainingRets(),       // arrays, in place, then old entries, if they are asked for
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashDoubleCuda, DoubleImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // keys u32 [sets, 2, ways]
                                  .Arg<ffi::AnyBuffer>()  // scores u32 [sets, 2, ways]
                                  .Arg<ffi::AnyBuffer>()  // touched s32 [sets, ways]
                                  .RemainingArgs()        // arrays [sets * ways, ...]
                                  .Ret<ffi::AnyBuffer>()  // keys u32 [2 sets, 2, ways], and so on
                                  .Ret<ffi::AnyBuffer>()  // scores
                                  .Ret<ffi::AnyBuffer>()  // touched
                                  .RemainingRets(),       // arrays, then workspace u8 [bytes]
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_tt
