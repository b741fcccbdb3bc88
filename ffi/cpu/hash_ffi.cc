// FFI handlers of hash tables.
#include <vector>

#include "ffi/common/hash_args.h"
#include "ffi/common/table_args.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/hash.h"

namespace jax_tt {
namespace {

Status ReadBatch(const ffi::AnyBuffer& keys, const ffi::AnyBuffer& present, HashBatch* batch) {
  return ReadHashBatch(keys, present, &batch->n, &batch->keys, &batch->present);
}

Status Find(const Pool& pool, const ffi::AnyBuffer& keys, const ffi::AnyBuffer& touched, const ffi::AnyBuffer& asked,
            const ffi::AnyBuffer& present, const ffi::AnyBuffer& slots) {
  HashDirectory directory;
  HashBatch batch;
  int32_t* slots_data = nullptr;
  JAX_TT_RETURN_IF_ERROR(ReadHashShape(touched, &directory));
  JAX_TT_RETURN_IF_ERROR(Data(keys, "keys", 2 * directory.capacity(), &directory.keys));
  JAX_TT_RETURN_IF_ERROR(ReadBatch(asked, present, &batch));
  JAX_TT_RETURN_IF_ERROR(Data(slots, "slots", batch.n, &slots_data));
  HashFind(directory, batch, pool, slots_data);
  return {};
}

ffi::Error FindImpl(ffi::ThreadPool threads, ffi::AnyBuffer keys, ffi::AnyBuffer touched, ffi::AnyBuffer asked,
                    ffi::AnyBuffer present, ffi::Result<ffi::AnyBuffer> slots) {
  return ToError(Find(MakePool(threads), keys, touched, asked, present, *slots), "hash_find");
}

// What an insertion takes and returns other than the directory.
struct InsertArgs {
  const ffi::AnyBuffer &asked, &present, &given, &now, &epoch;
  ffi::AnyBuffer &slots, &inserted, &old_keys, &old_scores, &old_touched, &counts;
};

Status ReadInsertion(const InsertArgs& args, int64_t n, HashInsertion* done) {
  JAX_TT_RETURN_IF_ERROR(Data(args.slots, "slots", n, &done->slots));
  JAX_TT_RETURN_IF_ERROR(Data(args.inserted, "inserted", 2 * n, &done->keys));
  JAX_TT_RETURN_IF_ERROR(Data(args.old_keys, "old keys", 2 * n, &done->old_keys));
  JAX_TT_RETURN_IF_ERROR(Data(args.old_scores, "old scores", 2 * n, &done->old_scores));
  JAX_TT_RETURN_IF_ERROR(Data(args.old_touched, "old touched", n, &done->old_touched));
  return Data(args.counts, "counts", kHashCounts, &done->counts);
}

Status Insert(const Pool& pool, const InsertArgs& args, HashDirectory* directory, const ffi::Dictionary& attrs) {
  HashBatch batch;
  HashInsertion done;
  HashStamp stamp = {};
  int64_t min_age = 1;
  const uint32_t *given = nullptr, *epoch = nullptr;
  const int32_t* now = nullptr;
  JAX_TT_RETURN_IF_ERROR(ReadHashPolicy(attrs, &stamp.policy, &min_age));
  JAX_TT_RETURN_IF_ERROR(ReadBatch(args.asked, args.present, &batch));
  JAX_TT_RETURN_IF_ERROR(Data(args.given, "given", 2 * batch.n, &given));
  JAX_TT_RETURN_IF_ERROR(Data(args.now, "now", 1, &now));
  JAX_TT_RETURN_IF_ERROR(Data(args.epoch, "epoch", 1, &epoch));
  JAX_TT_RETURN_IF_ERROR(ReadInsertion(args, batch.n, &done));
  stamp.now = static_cast<uint32_t>(*now);
  stamp.epoch = *epoch;
  return HashInsert(*directory, batch, given, stamp, min_age, pool, done);
}

ffi::Error InsertImpl(ffi::ThreadPool threads, ffi::AnyBuffer asked, ffi::AnyBuffer present, ffi::AnyBuffer given,
                      ffi::AnyBuffer now, ffi::AnyBuffer epoch, ffi::AnyBuffer keys, ffi::AnyBuffer scores,
                      ffi::AnyBuffer touched, ffi::Result<ffi::AnyBuffer> slots, ffi::Result<ffi::AnyBuffer> inserted,
                      ffi::Result<ffi::AnyBuffer> old_keys, ffi::Result<ffi::AnyBuffer> old_scores,
                      ffi::Result<ffi::AnyBuffer> old_touched, ffi::Result<ffi::AnyBuffer> counts,
                      ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_scores,
                      ffi::Result<ffi::AnyBuffer> new_touched, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    HashDirectory directory;
    JAX_TT_RETURN_IF_ERROR(ReadHashShape(touched, &directory));
    const int64_t capacity = directory.capacity();
    JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(touched, *new_touched, "touched", capacity, &directory.touched));
    JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(keys, *new_keys, "keys", 2 * capacity, &directory.keys));
    JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(scores, *new_scores, "scores", 2 * capacity, &directory.scores));
    return Insert(MakePool(threads),
                  {asked, present, given, now, epoch, *slots, *inserted, *old_keys, *old_scores, *old_touched, *counts},
                  &directory, attrs);
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
    JAX_TT_RETURN_IF_ERROR(ReadBatch(keys, wanted, &batch));
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

int64_t Bytes(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.size_bytes()); }

Status ReadExchanged(const Args& args, const Rets& results, size_t arrays, size_t k, int64_t n, int64_t* capacity,
                     HashArray* array) {
  const auto in = args.get<ffi::AnyBuffer>(k), from = args.get<ffi::AnyBuffer>(arrays + k);
  auto out = results.get<ffi::AnyBuffer>(k), old = results.get<ffi::AnyBuffer>(arrays + k);
  if (!in.has_value() || !from.has_value() || !out.has_value()) return InvalidArgument("an array is missing");
  if (in->dimensions().size() < 1) return InvalidArgument("arrays must have an axis of slots");
  if (k > 0 && in->dimensions()[0] != *capacity) return InvalidArgument("arrays must have the same number of slots");
  if (in->untyped_data() != (*out)->untyped_data() && Bytes(*in) > 0)
    return InvalidArgument("arrays must be updated in place");
  if (from->element_type() != in->element_type()) return InvalidArgument("entries must have the type of their array");
  *capacity = in->dimensions()[0];
  if (Bytes(*in) == 0) return {};
  array->entries = static_cast<char*>((*out)->untyped_data());
  array->entry_bytes = Bytes(*in) / *capacity;
  array->item_bytes = Bytes(*in) / Count(*in);
  array->from = static_cast<const char*>(from->untyped_data());
  array->constant = from->dimensions().size() == 0;
  if (!array->constant) JAX_TT_RETURN_IF_ERROR(CheckCount("entries", Bytes(*from), n * array->entry_bytes));
  if (results.size() <= arrays) return {};
  if (!old.has_value()) return InvalidArgument("an array of old entries is missing");
  array->old = static_cast<char*>((*old)->untyped_data());
  return CheckCount("old entries", Bytes(**old), n * array->entry_bytes);
}

ffi::Error ExchangeImpl(ffi::ThreadPool threads, ffi::AnyBuffer slots, Args args, Rets results) {
  const auto run = [&]() -> Status {
    const int64_t n = Count(slots);
    const int32_t* slots_data = nullptr;
    int64_t capacity = 0;
    std::vector<HashArray> arrays(args.size() / 2);
    JAX_TT_RETURN_IF_ERROR(Data(slots, "slots", -1, &slots_data));
    for (size_t k = 0; k < arrays.size(); ++k)
      JAX_TT_RETURN_IF_ERROR(ReadExchanged(args, results, arrays.size(), k, n, &capacity, &arrays[k]));
    return HashExchange(arrays, slots_data, n, capacity, MakePool(threads));
  };
  return ToError(run(), "hash_exchange");
}

// A new array that has twice the size of an old one.
template <typename T>
Status ReadDoubled(const ffi::AnyBuffer& before, const ffi::AnyBuffer& after, const char* name, int64_t count, T** old,
                   T** fresh) {
  JAX_TT_RETURN_IF_ERROR(Data(before, name, count, old));
  return Data(after, name, 2 * count, fresh);
}

ffi::Error DoubleImpl(ffi::ThreadPool threads, ffi::AnyBuffer keys, ffi::AnyBuffer scores, ffi::AnyBuffer touched,
                      Args args, ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_scores,
                      ffi::Result<ffi::AnyBuffer> new_touched, Rets results) {
  const auto run = [&]() -> Status {
    HashDirectory before, after;
    JAX_TT_RETURN_IF_ERROR(ReadHashShape(touched, &before));
    const int64_t capacity = before.capacity();
    if (capacity >= int64_t{1} << 30) return InvalidArgument("a table has at most 2^31 - 1 slots");
    after.sets = 2 * before.sets;
    after.ways = before.ways;
    JAX_TT_RETURN_IF_ERROR(ReadDoubled(touched, *new_touched, "touched", capacity, &before.touched, &after.touched));
    JAX_TT_RETURN_IF_ERROR(ReadDoubled(keys, *new_keys, "keys", 2 * capacity, &before.keys, &after.keys));
    JAX_TT_RETURN_IF_ERROR(ReadDoubled(scores, *new_scores, "scores", 2 * capacity, &before.scores, &after.scores));
    std::vector<HashGrown> arrays(args.size());
    for (size_t k = 0; k < arrays.size(); ++k) {
      const auto old = args.get<ffi::AnyBuffer>(k);
      auto grown = results.get<ffi::AnyBuffer>(k);
      if (!old.has_value() || !grown.has_value()) return InvalidArgument("an array is missing");
      JAX_TT_RETURN_IF_ERROR(CheckCount("array", Bytes(**grown), 2 * Bytes(*old)));
      if (Bytes(*old) % capacity != 0) return InvalidArgument("arrays must have an entry for every slot");
      PreferHugePages({**grown});
      arrays[k] = {static_cast<const char*>(old->untyped_data()), static_cast<char*>((*grown)->untyped_data()),
                   Bytes(*old) / capacity};
    }
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
