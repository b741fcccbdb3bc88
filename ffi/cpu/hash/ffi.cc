// FFI handlers of hash tables.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ffi/common/hash_args.h"
#include "ffi/common/table_args.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/hash/hash.h"

namespace jax_tt {
namespace {

TablesCall CallOf(const Args& args, const Rets& rets, const ffi::Dictionary& attrs) {
  return {args, rets, attrs, rets.size()};
}

// Runs the passes over the tables of a call, which `read` reads and `make` turns into passes.
template <typename Table, typename Read, typename Make>
ffi::Error Run(OpThreads threads, const char* op, const TablesCall& call, Read read, Make make) {
  const Pool pool = MakePool(threads);
  std::vector<Table> tables;
  std::vector<std::unique_ptr<Pass>> passes;
  Status status = read(call, &tables);
  if (status.ok())
    for (Table& table : tables) passes.push_back(make(table, tables, pool));
  if (status.ok()) status = RunPasses(passes, pool);
  return ToError(status, op);
}

ffi::Error FindImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run<HashSearch>(threads, "hash_find", CallOf(args, rets, attrs), ReadHashSearches,
                         [](const HashSearch& search, const auto&, const Pool&) { return HashFind(search); });
}

ffi::Error InsertImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run<HashEntry>(threads, "hash_insert", CallOf(args, rets, attrs), ReadHashEntries,
                        [](const HashEntry& entry, const std::vector<HashEntry>& all, const Pool& pool) {
                          int64_t total = 1;
                          for (const HashEntry& other : all) total += other.asked.batch.n;
                          // Its share of the threads.
                          return HashInsert(entry, (pool.workers * entry.asked.batch.n + total - 1) / total);
                        });
}

ffi::Error SetBackImpl(OpThreads, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    std::vector<HashClock> clocks;
    JAX_TT_RETURN_IF_ERROR(ReadHashClocks(CallOf(args, rets, attrs), &clocks));
    for (const HashClock& clock : clocks) {
      if (*clock.clock < clock.last) continue;
      const auto back = static_cast<uint32_t>(*clock.clock - clock.kept);
      for (const HashNumbers& numbers : clock.numbers)
        for (int64_t i = 0; i < numbers.count; ++i) numbers.SetBack(i, back);
    }
    return {};
  };
  return ToError(run(), "hash_set_back");
}

// Initial rows beside their keys or in slots, as `read_tables` reads them.
template <typename Read>
ffi::Error RunInitial(OpThreads threads, const char* op, const TablesCall& call, Read read_tables) {
  const auto read = [read_tables](const TablesCall& call, std::vector<HashFresh>* tables) -> Status {
    JAX_TT_RETURN_IF_ERROR(read_tables(call, tables));
    for (const HashFresh& table : *tables)
      JAX_TT_RETURN_IF_ERROR(DispatchStorage(table.type, [](auto) { return Status{}; }));
    return {};
  };
  const auto make = [](const HashFresh& table, const auto&, const Pool&) {
    const HashInitialArrays& given = table.values;
    const InitialValues values{given.quantiles, {given.seed[0], given.seed[1]}, *given.scale, given.with_sign};
    std::unique_ptr<Pass> pass;
    (void)DispatchStorage(table.type, [&](auto tag) -> Status {
      using T = typename decltype(tag)::type;
      T* const rows = static_cast<T*>(table.rows);
      pass = table.slots == nullptr ? HashInitial(values, table.batch, table.features, rows)
                                    : HashReset(values, table.batch, table.slots, table.capacity, table.features, rows);
      return {};
    });
    return pass;
  };
  return Run<HashFresh>(threads, op, call, read, make);
}

ffi::Error InitialImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return RunInitial(threads, "hash_initial", CallOf(args, rets, attrs), ReadHashFresh);
}

ffi::Error ResetImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return RunInitial(threads, "hash_reset", CallOf(args, rets, attrs), ReadHashResets);
}

ffi::Error ExchangeImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  return Run<HashExchanged>(threads, "hash_exchange", CallOf(args, rets, attrs), ReadHashExchanges,
                            [](HashExchanged& own, const auto&, const Pool&) { return HashExchange(std::move(own)); });
}

ffi::Error DoubleImpl(OpThreads threads, ffi::AnyBuffer keys, ffi::AnyBuffer scores, ffi::AnyBuffer touched, Args args,
                      ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_scores,
                      ffi::Result<ffi::AnyBuffer> new_touched, Rets results) {
  const auto run = [&]() -> Status {
    std::optional<HashDirectory> before, after;
    std::vector<HashGrown> arrays;
    JAX_TT_RETURN_IF_ERROR(
        ReadHashDoubled({keys, scores, touched, *new_keys, *new_scores, *new_touched}, &before, &after));
    JAX_TT_RETURN_IF_ERROR(ReadHashGrown(args, results, before->capacity(), &arrays));
    for (size_t k = 0; k < arrays.size(); ++k) PreferHugePages({**results.get<ffi::AnyBuffer>(k)});
    HashDouble(*before, *after, arrays, MakePool(threads));
    return {};
  };
  return ToError(run(), "hash_double");
}

}  // namespace

// Calls on many tables: what is listed is of each table, one table after another.  n = keys of its batch.
//
// hash_tables_find: keys u32 [sets, 2, ways], touched s32 [sets, ways], keys of the batch u32 [n, 2], present pred
// [n], guess s32 [n] or [0] -> slots s32 [n].  Attributes absent, safe_check, message.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesFindCpu, FindImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

// hash_tables_insert: keys of the batch u32 [n, 2], present pred [n], given u32 [n, 2], now s32 [], epoch u32 [], keys
// u32 [sets, 2, ways], scores u32 [sets, 2, ways], touched s32 [sets, ways] -> slots s32 [n], inserted u32 [n, 2], old
// keys u32 [n, 2], old scores u32 [n, 2], old touched s32 [n], counts s32 [7], found s32 [n]; and keys, scores and
// touched, in place.  The three old ones may be empty.  Attributes policy, min_age, safe_check, message.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesInsertCpu, InsertImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

// hash_tables_set_back: clock s32 [], arrays of numbers of batches, touched s32 [sets, ways] or scores u32 [sets, 2,
// ways] -> arrays, in place.  Attributes arrays, last, kept, and word_0, word_1, ...: -1 for touched, else the word of
// scores.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesSetBackCpu, SetBackImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

// hash_tables_initial: seed u32 [2], quantiles s32 [32, 129], scale f32 [], keys u32 [n, 2], wanted pred [n] -> rows
// [n, features].  Attribute signed.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesInitialCpu, InitialImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

// hash_tables_reset: seed u32 [2], quantiles s32 [32, 129], scale f32 [], keys u32 [n, 2], slots s32 [n], rows
// [capacity, features] -> rows, in place.  Attribute signed.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesResetCpu, ResetImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

// hash_tables_exchange: slots s32 [n], arrays [capacity, ...], as many new entries, [n, ...] or [] -> arrays, in place,
// and the old entries, if they are asked for.  Attributes arrays, return_old.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesExchangeCpu, ExchangeImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashDoubleCpu, DoubleImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // keys u32 [sets, 2, ways]
                                  .Arg<ffi::AnyBuffer>()  // scores u32 [sets, 2, ways]
                                  .Arg<ffi::AnyBuffer>()  // touched s32 [sets, ways]
                                  .RemainingArgs()        // arrays [sets * ways, ...]
                                  .Ret<ffi::AnyBuffer>()  // keys u32 [2 sets, 2, ways], and so on
                                  .Ret<ffi::AnyBuffer>()  // scores
                                  .Ret<ffi::AnyBuffer>()  // touched
                                  .RemainingRets());      // arrays

}  // namespace jax_tt
