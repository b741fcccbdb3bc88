// FFI handler of pooled sums over cached and uncached rows.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "ffi/cpu/args.h"
#include "ffi/cpu/cache/forward.h"
#include "ffi/cpu/dense/pool_bags.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/ids.h"
#include "ffi/cpu/tt/args.h"
#include "ffi/cpu/tt_plan/plan.h"

namespace jax_tt {
namespace {

// Arguments of a call other than the table: the cached rows, the batch, and the results.
struct CachedArgs {
  const ffi::AnyBuffer &slots, &rows, &rows_sentinel, &ids, &offsets, &weights, &sentinel;
  ffi::AnyBuffer &out, &packed_ids, &packed_offsets, &packed_weights, &place, &plan, &saved;
};

template <typename T>
Status ReadPacked(const CachedArgs& args, const Lookups& lookups, bool weighted,
                  PackedMisses<typename TTProblem<T>::C>* packed) {
  if (args.packed_ids.element_type() != args.ids.element_type() || Count(args.packed_ids) != Count(args.ids))
    return InvalidArgument("packed ids must have the type and the size of ids");
  packed->ids = static_cast<int32_t*>(args.packed_ids.untyped_data());
  JAX_TT_RETURN_IF_ERROR(Data(args.packed_offsets, "packed offsets", Count(args.offsets), &packed->offsets));
  if (!weighted) return {};
  JAX_TT_RETURN_IF_ERROR(Data(args.packed_weights, "packed weights", lookups.size(), &packed->weights));
  return Data(args.place, "place", lookups.size(), &packed->place);
}

// T and R are the storage types of the cores and of the cached rows.
template <typename T, typename R>
Status Forward(const CachedArgs& args, const Args& cores, const ffi::Dictionary& attrs, const Pool& pool) {
  using C = typename TTProblem<T>::C;
  TTProblem<T> problem;
  DenseProblem<R> hits;
  PackedMisses<C> packed;
  int64_t saved_size = 0;
  const int32_t* slots = nullptr;
  int32_t* plan = nullptr;
  C *out = nullptr, *saved = nullptr;
  JAX_TT_RETURN_IF_ERROR(ReadTable(attrs, &problem.shape));
  JAX_TT_RETURN_IF_ERROR(
      ReadTTProblem(attrs, {args.ids, args.offsets, args.weights}, cores, 0, &hits.lookups, &problem, &saved_size));
  const Lookups& lookups = hits.lookups;
  JAX_TT_RETURN_IF_ERROR(CheckSentinel(args.rows_sentinel, lookups.table));
  JAX_TT_RETURN_IF_ERROR(CheckSentinel(args.sentinel, lookups.table));
  if (!lookups.padded) return InvalidArgument("hits must be marked as padding among the ids");
  JAX_TT_RETURN_IF_ERROR(CheckOffsets(lookups.offsets, lookups.groups, lookups.bags, lookups.capacity));
  if (args.rows.dimensions().size() != 2 || args.rows.dimensions()[1] != problem.shape.dim())
    return InvalidArgument("cached rows must have two axes, the second one as long as a row of the table");
  hits.num_embeddings = args.rows.dimensions()[0];
  hits.dim = problem.shape.dim();
  hits.weights = problem.weights;
  JAX_TT_RETURN_IF_ERROR(Data(args.rows, "cached rows", -1, &hits.table));
  JAX_TT_RETURN_IF_ERROR(Data(args.slots, "slots", lookups.size(), &slots));
  for (int64_t i = 0; i < lookups.size(); ++i)
    if (slots[i] >= hits.num_embeddings) return InvalidArgument("a slot is beyond the last cached row");
  JAX_TT_RETURN_IF_ERROR(ReadPacked<T>(args, lookups, hits.weights != nullptr, &packed));
  JAX_TT_RETURN_IF_ERROR(Data(args.out, "out", problem.out_size(), &out));
  JAX_TT_RETURN_IF_ERROR(Data(args.plan, "plan", -1, &plan));
  JAX_TT_RETURN_IF_ERROR(OptionalData(args.saved, "saved", saved_size, &saved));
  PreferHugePages({args.out, args.plan, args.saved});
  if (Count(args.plan) < problem.layout.size()) return InvalidArgument("the plan is too small for this batch");
  problem.offsets = packed.offsets;
  problem.weights = packed.weights;
  problem.plan = plan;

  Workspace workspace;
  std::vector<BagSums<R>> sums(static_cast<size_t>(pool.workers));
  for (BagSums<R>& own : sums) own.RequestBuffers(hits.dim, workspace);
  JAX_TT_RETURN_IF_ERROR(workspace.Allocate());
  const PoolHits pool_hits = [&](int64_t bag, int64_t end, int worker) {
    PoolBags(
        hits, [slots](int64_t position) { return int64_t{slots[position]}; }, bag, end,
        sums[static_cast<size_t>(worker)], out);
  };
  return CacheForward(pool_hits, lookups, hits.weights, problem, packed, pool, plan, out, saved);
}

ffi::Error ForwardImpl(OpThreads threads, ffi::AnyBuffer slots, ffi::AnyBuffer rows, ffi::AnyBuffer rows_sentinel,
                       ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights, ffi::AnyBuffer sentinel,
                       Args cores, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> packed_ids,
                       ffi::Result<ffi::AnyBuffer> packed_offsets, ffi::Result<ffi::AnyBuffer> packed_weights,
                       ffi::Result<ffi::AnyBuffer> place, ffi::Result<ffi::AnyBuffer> plan,
                       ffi::Result<ffi::AnyBuffer> saved, ffi::Dictionary attrs) {
  const CachedArgs args{slots,           rows,     rows_sentinel, ids,         offsets,
                        weights,         sentinel, *out,          *packed_ids, *packed_offsets,
                        *packed_weights, *place,   *plan,         *saved};
  const auto dispatch = [&](auto core) -> Status {
    using T = typename decltype(core)::type;
    return DispatchStorage(rows.element_type(), [&](auto row) -> Status {
      using R = typename decltype(row)::type;
      if constexpr (std::is_same_v<typename ComputeType<T>::type, typename ComputeType<R>::type>)
        return Forward<T, R>(args, cores, attrs, MakePool(threads));
      return InvalidArgument("cached rows and cores must both be float64 or neither");
    });
  };
  return ToError(DispatchCores(cores, 0, dispatch), attrs);
}

}  // namespace

// d = number of cores, n = ids, G = groups, B = bags of a group, N x D = the cached rows.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CacheForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // slots s32 [n], negative for misses
                                  .Arg<ffi::AnyBuffer>()  // cached rows [N, D]
                                  .Arg<ffi::AnyBuffer>()  // their sentinel f32 []
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G], padding for hits
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 [] of the cores
                                  .RemainingArgs()        // cores
                                  .Ret<ffi::AnyBuffer>()  // out [G.., B, D]
                                  .Ret<ffi::AnyBuffer>()  // ids of the misses, packed
                                  .Ret<ffi::AnyBuffer>()  // their offsets s32 [G.., B + 1]
                                  .Ret<ffi::AnyBuffer>()  // their weights [n], or empty
                                  .Ret<ffi::AnyBuffer>()  // place s32 [n], or empty without weights
                                  .Ret<ffi::AnyBuffer>()  // plan s32 [PlanLayout::size() or more]
                                  .Ret<ffi::AnyBuffer>()  // saved [n, elements], or empty
                                  .Attrs());

}  // namespace jax_tt
