#include "ffi/common/hash_args.h"

#include <optional>
#include <string>
#include <utility>

namespace jax_tt {
namespace {

int64_t Bytes(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.size_bytes()); }

// Array k of an exchange; `from` are its new entries, and `old` where the old ones go, if anywhere.
Status ReadExchanged(const ffi::AnyBuffer& in, const ffi::AnyBuffer& from, const ffi::AnyBuffer& out,
                     const ffi::AnyBuffer* old, HashExchanged* exchange, HashArray* array) {
  if (in.dimensions().size() < 1) return InvalidArgument("arrays must have an axis of slots");
  if (array != exchange->arrays.data() && in.dimensions()[0] != exchange->capacity)
    return InvalidArgument("arrays must have the same number of slots");
  if (in.untyped_data() != out.untyped_data() && Bytes(in) > 0)
    return InvalidArgument("arrays must be updated in place");
  if (from.element_type() != in.element_type()) return InvalidArgument("entries must have the type of their array");
  exchange->capacity = in.dimensions()[0];
  if (Bytes(in) == 0) return {};
  array->entries = static_cast<char*>(out.untyped_data());
  array->entry_bytes = Bytes(in) / exchange->capacity;
  array->item_bytes = Bytes(in) / Count(in);
  array->from = static_cast<const char*>(from.untyped_data());
  array->constant = from.dimensions().size() == 0;
  const int64_t bytes = exchange->n * array->entry_bytes;
  if (!array->constant) JAX_TT_RETURN_IF_ERROR(CheckCount("entries", Bytes(from), bytes));
  if (old == nullptr) return {};
  array->old = static_cast<char*>(old->untyped_data());
  return CheckCount("old entries", Bytes(*old), bytes);
}

Status ReadCheck(const ffi::Dictionary& attrs, HashCheck* check) {
  JAX_TT_RETURN_IF_ERROR(ReadNamed(attrs, "safe_check", HashCheck::kNames, &check->mode));
  return ReadAttr(attrs, "message", &check->message);
}

Status ReadPolicy(const ffi::Dictionary& attrs, HashRequests* asked) {
  JAX_TT_RETURN_IF_ERROR(ReadNamed(attrs, "policy", kHashPolicyNames, &asked->policy));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "min_age", &asked->min_age));
  if (asked->min_age < 1) return InvalidArgument("min_age must be at least 1");
  return {};
}

// Last batches s32 [sets, ways], or scores u32 [sets, 2, ways] with numbers of batches in one word.
Status ReadNumbers(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out, int64_t word, HashNumbers* numbers) {
  if (in.dimensions().size() != (word < 0 ? 2 : 3) || word < -1 || word > 1 || (word >= 0 && in.dimensions()[1] != 2))
    return InvalidArgument("numbers of batches are last batches, or one of two words of scores");
  numbers->word = word;
  numbers->ways = in.dimensions().back();
  numbers->count = Count(in) / (word < 0 ? 1 : 2);
  if (word >= 0) return UpdatedInPlace(in, out, "scores", Count(in), &numbers->entries);
  int32_t* entries = nullptr;
  JAX_TT_RETURN_IF_ERROR(UpdatedInPlace(in, out, "touched", Count(in), &entries));
  numbers->entries = reinterpret_cast<uint32_t*>(entries);
  return {};
}

// Seed, quantiles and scale, the first arguments of an op.
Status ReadInitial(const Buffers& args, const ffi::Dictionary& attrs, HashInitialArrays* values) {
  JAX_TT_RETURN_IF_ERROR(Data(args[0], "seed", 2, &values->seed));
  JAX_TT_RETURN_IF_ERROR(Data(args[1], "quantiles", kQuantiles, &values->quantiles));
  JAX_TT_RETURN_IF_ERROR(Data(args[2], "scale", 1, &values->scale));
  return ReadAttr(attrs, "signed", &values->with_sign);
}

// The rows of a table, which may be a part of an array that the reader made: nothing keeps the buffer itself.
Status ReadFreshRows(const ffi::AnyBuffer& rows, HashFresh* fresh) {
  if (rows.dimensions().size() < 1) return InvalidArgument("rows must have an axis of columns");
  fresh->features = rows.dimensions().back();
  fresh->rows = rows.untyped_data();
  fresh->type = rows.element_type();
  return {};
}

// Calls read(attrs) for one table after another, until all arguments and results are read.
template <typename Read>
Status ForTables(TableReader& reader, Read read) {
  while (!reader.done()) {
    std::optional<ffi::Dictionary> attrs;
    JAX_TT_RETURN_IF_ERROR(reader.ReadAttrs(&attrs));
    JAX_TT_RETURN_IF_ERROR(read(*attrs));
  }
  return {};
}

Status ReadDirectoryArrays(const ffi::AnyBuffer& keys, const ffi::AnyBuffer& scores, HashDirectoryArrays* arrays) {
  JAX_TT_RETURN_IF_ERROR(ReadCounted(keys, "keys", &arrays->keys));
  return ReadCounted(scores, "scores", &arrays->scores);
}

}  // namespace

Status ReadHashSearches(const TablesCall& call, std::vector<HashSearch>* searches) {
  TableReader reader(call);
  Buffers args, rows, rets;
  return ForTables(reader, [&](const ffi::Dictionary& attrs) -> Status {
    HashDirectoryArrays arrays;
    std::optional<HashDirectory> directory;
    int64_t absent = 0;
    JAX_TT_RETURN_IF_ERROR(reader.ReadRowArgs(attrs, 2, &rows));
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(3, &args));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(1, &rets));
    JAX_TT_RETURN_IF_ERROR(ReadCounted(rows[0], "keys", &arrays.keys));
    JAX_TT_RETURN_IF_ERROR(ReadHashDirectory(rows[1], arrays, &directory));
    HashSearch search{.directory = *directory};
    JAX_TT_RETURN_IF_ERROR(ReadHashBatch(args[0], args[1], &search.batch));
    JAX_TT_RETURN_IF_ERROR(OptionalData(args[2], "guess", search.batch.n, &search.guess));
    JAX_TT_RETURN_IF_ERROR(Data(rets[0], "slots", search.batch.n, &search.slots));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "absent", &absent));
    JAX_TT_RETURN_IF_ERROR(ReadCheck(attrs, &search.check));
    search.absent = static_cast<int32_t>(absent);
    searches->push_back(search);
    return {};
  });
}

Status ReadHashEntries(const TablesCall& call, std::vector<HashEntry>* entries) {
  TableReader reader(call);
  Buffers args, rows, rets, after;
  return ForTables(reader, [&](const ffi::Dictionary& attrs) -> Status {
    std::optional<HashDirectory> directory;
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(5, &args));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRowArgs(attrs, 3, &rows));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(7, &rets));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRowRets(attrs, 3, &after));
    JAX_TT_RETURN_IF_ERROR(ReadHashInPlace({rows[0], rows[1], rows[2], after[0], after[1], after[2]}, &directory));
    HashEntry entry{.directory = *directory};
    HashInsertion& done = entry.done;
    JAX_TT_RETURN_IF_ERROR(ReadPolicy(attrs, &entry.asked));
    JAX_TT_RETURN_IF_ERROR(ReadCheck(attrs, &entry.check));
    JAX_TT_RETURN_IF_ERROR(ReadHashBatch(args[0], args[1], &entry.asked.batch));
    const int64_t n = entry.asked.batch.n;
    JAX_TT_RETURN_IF_ERROR(Data(args[2], "given", 2 * n, &entry.asked.given));
    JAX_TT_RETURN_IF_ERROR(Data(args[3], "now", 1, &entry.asked.now));
    JAX_TT_RETURN_IF_ERROR(Data(args[4], "epoch", 1, &entry.asked.epoch));
    JAX_TT_RETURN_IF_ERROR(Data(rets[0], "slots", n, &done.slots));
    JAX_TT_RETURN_IF_ERROR(Data(rets[1], "inserted", 2 * n, &done.keys));
    JAX_TT_RETURN_IF_ERROR(OptionalData(rets[2], "old keys", 2 * n, &done.old_keys));
    JAX_TT_RETURN_IF_ERROR(OptionalData(rets[3], "old scores", 2 * n, &done.old_scores));
    JAX_TT_RETURN_IF_ERROR(OptionalData(rets[4], "old touched", n, &done.old_touched));
    JAX_TT_RETURN_IF_ERROR(Data(rets[5], "counts", kHashCounts, &done.counts));
    JAX_TT_RETURN_IF_ERROR(Data(rets[6], "found", n, &done.found));
    entries->push_back(entry);
    return {};
  });
}

Status ReadHashClocks(const TablesCall& call, std::vector<HashClock>* clocks) {
  TableReader reader(call);
  Buffers clock, args, rets;
  return ForTables(reader, [&](const ffi::Dictionary& attrs) -> Status {
    HashClock own;
    int64_t count = 0;
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "arrays", &count));
    const auto arrays = static_cast<size_t>(count);
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "last", &own.last));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "kept", &own.kept));
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &clock));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRowArgs(attrs, arrays, &args));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRowRets(attrs, arrays, &rets));
    JAX_TT_RETURN_IF_ERROR(Data(clock[0], "clock", 1, &own.clock));
    own.numbers.resize(arrays);
    for (size_t k = 0; k < arrays; ++k) {
      int64_t word = 0;
      JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "word_" + std::to_string(k), &word));
      JAX_TT_RETURN_IF_ERROR(ReadNumbers(args[k], rets[k], word, &own.numbers[k]));
    }
    clocks->push_back(std::move(own));
    return {};
  });
}

Status ReadHashFresh(const TablesCall& call, std::vector<HashFresh>* fresh) {
  TableReader reader(call);
  Buffers args, rets;
  return ForTables(reader, [&](const ffi::Dictionary& attrs) -> Status {
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(5, &args));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(1, &rets));
    HashFresh own;
    JAX_TT_RETURN_IF_ERROR(ReadInitial(args, attrs, &own.values));
    JAX_TT_RETURN_IF_ERROR(ReadHashBatch(args[3], args[4], &own.batch));
    JAX_TT_RETURN_IF_ERROR(ReadFreshRows(rets[0], &own));
    JAX_TT_RETURN_IF_ERROR(CheckCount("rows", Count(rets[0]), own.batch.n * own.features));
    fresh->push_back(own);
    return {};
  });
}

Status ReadHashResets(const TablesCall& call, std::vector<HashFresh>* resets) {
  TableReader reader(call);
  Buffers args, rows, rets;
  return ForTables(reader, [&](const ffi::Dictionary& attrs) -> Status {
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(5, &args));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRowArgs(attrs, 1, &rows));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRowRets(attrs, 1, &rets));
    HashFresh own;
    JAX_TT_RETURN_IF_ERROR(ReadInitial(args, attrs, &own.values));
    own.batch.n = Count(args[4]);
    JAX_TT_RETURN_IF_ERROR(Data(args[3], "keys of the batch", 2 * own.batch.n, &own.batch.keys));
    JAX_TT_RETURN_IF_ERROR(Data(args[4], "slots", -1, &own.slots));
    JAX_TT_RETURN_IF_ERROR(ReadFreshRows(rets[0], &own));
    if (rets[0].dimensions().size() != 2) return InvalidArgument("rows must have an axis of slots and one of columns");
    own.capacity = rets[0].dimensions()[0];
    JAX_TT_RETURN_IF_ERROR(CheckCount("rows", Count(rows[0]), Count(rets[0])));
    if (rows[0].untyped_data() != own.rows && Bytes(rets[0]) > 0)
      return InvalidArgument("rows must be updated in place");
    resets->push_back(own);
    return {};
  });
}

Status ReadHashExchanges(const TablesCall& call, std::vector<HashExchanged>* exchanges) {
  TableReader reader(call);
  Buffers slots, args, fresh, rets, old;
  return ForTables(reader, [&](const ffi::Dictionary& attrs) -> Status {
    HashExchanged own;
    int64_t count = 0;
    bool return_old = false;
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "arrays", &count));
    JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "return_old", &return_old));
    const auto arrays = static_cast<size_t>(count);
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(1, &slots));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRowArgs(attrs, arrays, &args));
    JAX_TT_RETURN_IF_ERROR(reader.ReadArgs(arrays, &fresh));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRowRets(attrs, arrays, &rets));
    JAX_TT_RETURN_IF_ERROR(reader.ReadRets(return_old ? arrays : 0, &old));
    JAX_TT_RETURN_IF_ERROR(Data(slots[0], "slots", -1, &own.slots));
    own.n = Count(slots[0]);
    own.arrays.resize(arrays);
    for (size_t k = 0; k < arrays; ++k)
      JAX_TT_RETURN_IF_ERROR(
          ReadExchanged(args[k], fresh[k], rets[k], return_old ? &old[k] : nullptr, &own, &own.arrays[k]));
    exchanges->push_back(std::move(own));
    return {};
  });
}

Status ReadHashDoubled(const HashDirectoryArgs& args, std::optional<HashDirectory>* before,
                       std::optional<HashDirectory>* after) {
  HashDirectoryArrays old, fresh;
  JAX_TT_RETURN_IF_ERROR(ReadDirectoryArrays(args.keys, args.scores, &old));
  JAX_TT_RETURN_IF_ERROR(ReadDirectoryArrays(args.new_keys, args.new_scores, &fresh));
  JAX_TT_RETURN_IF_ERROR(ReadHashDirectory(args.touched, old, before));
  JAX_TT_RETURN_IF_ERROR(ReadCounted(args.new_touched, "touched", &fresh.touched));
  return MakeHashDirectory(2 * (*before)->sets, (*before)->ways, fresh, after);
}

Status ReadHashGrown(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, int64_t capacity,
                     std::vector<HashGrown>* arrays) {
  for (size_t k = 0; k < args.size(); ++k) {
    const auto old = args.get<ffi::AnyBuffer>(k);
    auto grown = results.get<ffi::AnyBuffer>(k);
    if (!old.has_value() || !grown.has_value()) return InvalidArgument("an array is missing");
    JAX_TT_RETURN_IF_ERROR(CheckCount("array", Bytes(**grown), 2 * Bytes(*old)));
    if (Bytes(*old) % capacity != 0) return InvalidArgument("arrays must have an entry for every slot");
    arrays->push_back({static_cast<const char*>(old->untyped_data()), static_cast<char*>((*grown)->untyped_data()),
                       Bytes(*old) / capacity});
  }
  return {};
}

}  // namespace jax_tt
