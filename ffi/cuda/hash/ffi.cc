// FFI handlers of hash tables on the GPU: shapes and types are checked here, launches are elsewhere.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "ffi/common/hash_args.h"
#include "ffi/cuda/gpu_args.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/hash/hash.h"
#include "ffi/cuda/stream.h"

namespace jax_tt {
namespace {

using Result = ffi::Result<ffi::AnyBuffer>;

// Calls enqueue(table) for the tables of a call, which `read` reads: the work on them follows each other in the stream.
template <typename Table, typename Read, typename Enqueue>
ffi::Error ForTables(const char* op, const TablesCall& call, Read read, Enqueue enqueue) {
  const auto run = [&]() -> Status {
    std::vector<Table> tables;
    JAX_TT_RETURN_IF_ERROR(read(call, &tables));
    for (const Table& table : tables) JAX_TT_RETURN_IF_ERROR(enqueue(table));
    return {};
  };
  return ToError(run(), op);
}

ffi::Error FindImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  return ForTables<HashSearch>("hash_find", {args, rets, attrs, rets.size()}, ReadHashSearches,
                               [&](const HashSearch& search) { return HashFind(stream, search); });
}

ffi::Error InsertImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  void* memory = nullptr;
  // The tables take turns in one workspace.
  const auto read = [&](const TablesCall& call, std::vector<HashEntry>* entries) -> Status {
    JAX_TT_RETURN_IF_ERROR(ReadHashEntries(call, entries));
    int64_t bytes = 0;
    for (const HashEntry& entry : *entries) {
      const int64_t n = entry.asked.batch.n;
      if (n > kMaxHashKeys) return InvalidArgument("a GPU inserts at most 2^30 keys at once, got " + std::to_string(n));
      bytes = std::max(bytes, HashInsertWorkspace(entry.directory, n));
    }
    return ReadLastWorkspace(rets, bytes, &memory);
  };
  return ForTables<HashEntry>("hash_insert", {args, rets, attrs, rets.size() - 1}, read,
                              [&](const HashEntry& entry) { return HashInsert(stream, entry, memory); });
}

ffi::Error SetBackImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  return ForTables<HashClock>("hash_set_back", {args, rets, attrs, rets.size()}, ReadHashClocks,
                              [&](const HashClock& clock) { return HashSetBack(stream, clock); });
}

ffi::Error InitialImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  return ForTables<HashFresh>(
      "hash_initial", {args, rets, attrs, rets.size()}, ReadHashFresh, [&](const HashFresh& fresh) {
        return DispatchGpuStorage(fresh.type, [&](auto tag) -> Status {
          using T = typename decltype(tag)::type;
          return HashInitial(stream, fresh.values, fresh.batch, fresh.features, static_cast<T*>(fresh.rows));
        });
      });
}

ffi::Error ExchangeImpl(cudaStream_t stream, Args args, Rets rets, ffi::Dictionary attrs) {
  return ForTables<HashExchanged>(
      "hash_exchange", {args, rets, attrs, rets.size()}, ReadHashExchanges,
      [&](const HashExchanged& own) { return HashExchange(stream, own.arrays, {own.slots, own.n, own.capacity}); });
}

ffi::Error DoubleImpl(cudaStream_t stream, ffi::AnyBuffer keys, ffi::AnyBuffer scores, ffi::AnyBuffer touched,
                      ffi::RemainingArgs args, Result new_keys, Result new_scores, Result new_touched,
                      ffi::RemainingRets results) {
  const auto run = [&]() -> Status {
    std::optional<HashDirectory> before, after;
    std::vector<HashGrown> arrays;
    void* memory = nullptr;
    JAX_TT_RETURN_IF_ERROR(
        ReadHashDoubled({keys, scores, touched, *new_keys, *new_scores, *new_touched}, &before, &after));
    JAX_TT_RETURN_IF_ERROR(ReadHashGrown(args, results, before->capacity(), &arrays));
    JAX_TT_RETURN_IF_ERROR(ReadLastWorkspace(results, HashDoubleWorkspace(*before), &memory));
    return HashDouble(stream, *before, *after, arrays, memory);
  };
  return ToError(run(), "hash_double");
}

}  // namespace

// As on the CPU (ffi/cpu/hash/ffi.cc), with the stream for the thread pool, and where an op needs it one result more
// behind those of all tables, the workspace.  The attributes safe_check and message are not looked at.
XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesFindCuda, FindImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesInsertCuda, InsertImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesSetBackCuda, SetBackImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesInitialCuda, InitialImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(HashTablesExchangeCuda, ExchangeImpl,
                              ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs(),
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
