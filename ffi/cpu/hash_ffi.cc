// FFI handlers of hash tables.
#include <vector>

#include "ffi/common/hash_args.h"
#include "ffi/common/table_args.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/hash.h"

namespace jax_tt {
namespace {

Status Find(const Pool& pool, const ffi::AnyBuffer& keys, const ffi::AnyBuffer& touched, const ffi::AnyBuffer& asked,
            const ffi::AnyBuffer& present, const ffi::AnyBuffer& slots) {
  HashDirectory directory;
  HashBatch batch;
  int32_t* slots_data = nullptr;
  JAX_TT_RETURN_IF_ERROR(ReadHashShape(touched, &directory));
  JAX_TT_RETURN_IF_ERROR(Data(keys, "keys", 2 * directory.capacity(), &directory.keys));
  JAX_TT_RETURN_IF_ERROR(ReadHashBatch(asked, present, &batch));
  JAX_TT_RETURN_IF_ERROR(Data(slots, "slots", batch.n, &slots_data));
  HashFind(directory, batch, pool, slots_data);
  return {};
}

ffi::Error FindImpl(ffi::ThreadPool threads, ffi::AnyBuffer keys, ffi::AnyBuffer touched, ffi::AnyBuffer asked,
                    ffi::AnyBuffer present, ffi::Result<ffi::AnyBuffer> slots) {
  return ToError(Find(MakePool(threads), keys, touched, asked, present, *slots), "hash_find");
}

// What an insertion takes other than the directory.
struct InsertArgs {
  const ffi::AnyBuffer &asked, &present, &given, &now, &epoch;
};

Status Insert(const Pool& pool, const InsertArgs& args, const HashInsertionArgs& results, const ffi::AnyBuffer& found,
              const HashDirectory& directory, const ffi::Dictionary& attrs) {
  HashBatch batch;
  HashInsertion done;
  HashStamp stamp = {};
  int64_t min_age = 1;
  const uint32_t *given = nullptr, *epoch = nullptr;
  const int32_t* now = nullptr;
  JAX_TT_RETURN_IF_ERROR(ReadHashPolicy(attrs, &stamp.policy, &min_age));
  JAX_TT_RETURN_IF_ERROR(ReadHashBatch(args.asked, args.present, &batch));
  JAX_TT_RETURN_IF_ERROR(Data(args.given, "given", 2 * batch.n, &given));
  JAX_TT_RETURN_IF_ERROR(Data(args.now, "now", 1, &now));
  JAX_TT_RETURN_IF_ERROR(Data(args.epoch, "epoch", 1, &epoch));
  JAX_TT_RETURN_IF_ERROR(ReadHashInsertion(results, batch.n, &done));
  JAX_TT_RETURN_IF_ERROR(Data(found, "found", batch.n, &done.found));
  stamp.now = static_cast<uint32_t>(*now);
  stamp.epoch = *epoch;
  return HashInsert(directory, batch, given, stamp, min_age, pool, done);
}

ffi::Error InsertImpl(ffi::ThreadPool threads, ffi::AnyBuffer asked, ffi::AnyBuffer present, ffi::AnyBuffer given,
                      ffi::AnyBuffer now, ffi::AnyBuffer epoch, ffi::AnyBuffer keys, ffi::AnyBuffer scores,
                      ffi::AnyBuffer touched, ffi::Result<ffi::AnyBuffer> slots, ffi::Result<ffi::AnyBuffer> inserted,
                      ffi::Result<ffi::AnyBuffer> old_keys, ffi::Result<ffi::AnyBuffer> old_scores,
                      ffi::Result<ffi::AnyBuffer> old_touched, ffi::Result<ffi::AnyBuffer> counts,
                      ffi::Result<ffi::AnyBuffer> found, ffi::Result<ffi::AnyBuffer> new_keys,
                      ffi::Result<ffi::AnyBuffer> new_scores, ffi::Result<ffi::AnyBuffer> new_touched,
                      ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    HashDirectory directory;
    JAX_TT_RETURN_IF_ERROR(ReadHashInPlace({keys, scores, touched, *new_keys, *new_scores, *new_touched}, &directory));
    return Insert(MakePool(threads), {asked, present, given, now, epoch},
                  {*slots, *inserted, *old_keys, *old_scores, *old_touched, *counts}, *found, directory, attrs);
  };
  return ToError(run(), "hash_insert");
}

ffi::Error InitialImpl(ffi::ThreadPool threads, ffi::AnyBuffer seed, ffi::AnyBuffer quantiles, ffi::AnyBuffer scale,
                       ffi::AnyBuffer keys, ffi::AnyBuffer wanted, ffi::Result<ffi::AnyBuffer> rows,
                       ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    InitialValues values = {};
    HashBatch batch;
    const uint32_t* seed_data = nullptr;
    const float* scale_data = nullptr;
    JAX_TT_RETURN_IF_ERROR(Data(seed, "seed", 2, &seed_data));
    JAX_TT_RETURN_IF_ERROR(Data(quantiles, "quantiles", kQuantiles, &values.quantiles));
    JAX_TT_RETURN_IF_ERROR(Data(scale, "scale", 1, &scale_data));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "signed", &values.with_sign));
    JAX_TT_RETURN_IF_ERROR(ReadHashBatch(keys, wanted, &batch));
    values.seed[0] = seed_data[0];
    values.seed[1] = seed_data[1];
    values.scale = *scale_data;
    if (rows->dimensions().size() != 2) return InvalidArgument("rows must have two axes");
    const int64_t features = rows->dimensions()[1];
    return DispatchStorage(rows->element_type(), [&](auto tag) -> Status {
      typename decltype(tag)::type* rows_data = nullptr;
      JAX_TT_RETURN_IF_ERROR(Data(*rows, "rows", batch.n * features, &rows_data));
      HashInitial(values, batch, features, MakePool(threads), rows_data);
      return {};
    });
  };
  return ToError(run(), "hash_initial");
}

ffi::Error ExchangeImpl(ffi::ThreadPool threads, ffi::AnyBuffer slots, Args args, Rets results) {
  const auto run = [&]() -> Status {
    const int64_t n = Count(slots);
    const int32_t* slots_data = nullptr;
    int64_t capacity = 0;
    std::vector<HashArray> arrays;
    JAX_TT_RETURN_IF_ERROR(Data(slots, "slots", -1, &slots_data));
    JAX_TT_RETURN_IF_ERROR(ReadHashArrays(args, results, n, &capacity, &arrays));
    return HashExchange(arrays, slots_data, n, capacity, MakePool(threads));
  };
  return ToError(run(), "hash_exchange");
}

ffi::Error DoubleImpl(ffi::ThreadPool threads, ffi::AnyBuffer keys, ffi::AnyBuffer scores, ffi::AnyBuffer touched,
                      Args args, ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_scores,
                      ffi::Result<ffi::AnyBuffer> new_touched, Rets results) {
  const auto run = [&]() -> Status {
    HashDirectory before, after;
    std::vector<HashGrown> arrays;
    JAX_TT_RETURN_IF_ERROR(
        ReadHashDoubled({keys, scores, touched, *new_keys, *new_scores, *new_touched}, &before, &after));
    JAX_TT_RETURN_IF_ERROR(ReadHashGrown(args, results, before.capacity(), &arrays));
    for (size_t k = 0; k < arrays.size(); ++k) PreferHugePages({**results.get<ffi::AnyBuffer>(k)});
    HashDouble(before, after, arrays, MakePool(threads));
    return {};
  };
  return ToError(run(), "hash_double");
}

}  // namespace

// n = keys of the batch.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HashFindCpu, FindImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // keys u32 [sets, 2, ways]
                                  .Arg<ffi::AnyBuffer>()    // touched s32 [sets, ways]
                                  .Arg<ffi::AnyBuffer>()    // keys of the batch u32 [n, 2]
                                  .Arg<ffi::AnyBuffer>()    // present pred [n]
                                  .Ret<ffi::AnyBuffer>());  // slots s32 [n]

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashInsertCpu, InsertImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
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
                                  .Ret<ffi::AnyBuffer>()  // found s32 [n]
                                  .Ret<ffi::AnyBuffer>()  // keys, in place, as all that follow
                                  .Ret<ffi::AnyBuffer>()  // scores
                                  .Ret<ffi::AnyBuffer>()  // touched
                                  .Attrs());              // policy, min_age

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashInitialCpu, InitialImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // seed u32 [2]
                                  .Arg<ffi::AnyBuffer>()  // quantiles s32 [32, 129]
                                  .Arg<ffi::AnyBuffer>()  // scale f32 []
                                  .Arg<ffi::AnyBuffer>()  // keys u32 [n, 2]
                                  .Arg<ffi::AnyBuffer>()  // wanted pred [n]
                                  .Ret<ffi::AnyBuffer>()  // rows [n, features]
                                  .Attrs());              // signed

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashExchangeCpu, ExchangeImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // slots s32 [n]
                                  .RemainingArgs()        // arrays [capacity, ...], then new entries [n, ...] or []
                                  .RemainingRets());      // arrays, in place, then old entries, if they are asked for

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashDoubleCpu, DoubleImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // keys u32 [sets, 2, ways]
                                  .Arg<ffi::AnyBuffer>()  // scores u32 [sets, 2, ways]
                                  .Arg<ffi::AnyBuffer>()  // touched s32 [sets, ways]
                                  .RemainingArgs()        // arrays [sets * ways, ...]
                                  .Ret<ffi::AnyBuffer>()  // keys u32 [2 sets, 2, ways], and so on
                                  .Ret<ffi::AnyBuffer>()  // scores
                                  .Ret<ffi::AnyBuffer>()  // touched
                                  .RemainingRets());      // arrays

}  // namespace jax_tt
