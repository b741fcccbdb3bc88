#include <algorithm>
#include <bit>
#include <type_traits>

#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/dense_ids.h"
#include "ffi/cuda/dense_lanes.h"
#include "ffi/cuda/dense_sort.h"
#include "ffi/cuda/sort.h"

namespace jax_tt {
namespace {

__device__ __forceinline__ int64_t ThreadIndex() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

bool NeedsTwoWords(int64_t num_embeddings) { return num_embeddings > INT32_MAX; }

// Thread i takes position i and the i-th offset.
__global__ void __launch_bounds__(kDenseThreads) MakeKeys(DenseBatch batch, DensePlan plan) {
  const int64_t i = ThreadIndex();
  const int64_t per_group = batch.bags + 1;
  if (i < batch.groups * per_group) {
    const int32_t offset = batch.offsets[i];
    const bool first = static_cast<uint64_t>(i) % static_cast<uint64_t>(per_group) == 0;
    if (offset > batch.capacity || (first ? offset != 0 : offset < batch.offsets[i - 1]))
      atomicOr(plan.flags + kBadOffsets, 1);
  }
  if (i >= plan.n) return;
  const int32_t bag = BagOf(batch, i);
  const int64_t row = bag < 0 ? kNoRow : ResolveId(batch, i);
  if (row == kPoisonedRow) atomicOr(plan.flags + kBadIds, 1);
  plan.keys.Set(i, row < 0 ? batch.num_embeddings : row);
  plan.bag_of[i] = row == kPoisonedRow ? DensePlan::kPoisoned : row < 0 ? -1 : bag;
}

// A warp takes a tile of sorted positions, and one more warp the word after the last tile.
__global__ void __launch_bounds__(kDenseThreads)
    MarkRows(DenseBatch batch, bool all_or_none, DensePlan plan, const int32_t* order) {
  const int64_t i = ThreadIndex(), tile = i / kDenseTile;
  bool head = true;
  if (i < plan.n) {
    const int32_t position = order[i];
    const int64_t row = plan.keys.Get(position);
    head = i == 0 || row != plan.keys.Get(order[i - 1]);
    const bool refused = plan.flags[kBadOffsets] != 0 || (all_or_none && plan.flags[kBadIds] != 0);
    plan.bag[i] = row < batch.num_embeddings && !refused ? plan.bag_of[position] : -1;
    if (batch.weights != nullptr) plan.weight[i] = batch.weights[position];
    plan.row[i] = row;
  }
  const unsigned heads = __ballot_sync(kAllLanes, head);
  if (tile <= plan.tiles && i % kDenseTile == 0) plan.head[tile] = heads;
}

// The passes that sort a word of this many bits, as even as they come: fewer bins make a pass cheaper.
int AddPasses(const int32_t* word, int bits, SortPass* passes) {
  constexpr int kMaxBits = 10;
  const int count = (bits + kMaxBits - 1) / kMaxBits, each = count == 0 ? 0 : (bits + count - 1) / count;
  for (int k = 0; k < count; ++k) {
    const int bins = 1 << std::min(each, bits - k * each);
    passes[k] = {word, bins, k * each, bins - 1};
  }
  return count;
}

// All passes over the keys 0 .. num_embeddings; returns how many.
int MakePasses(int64_t num_embeddings, const RowKeys& keys, SortPass* passes) {
  const int bits = std::max<int>(1, std::bit_width(static_cast<uint64_t>(num_embeddings)));
  if (!NeedsTwoWords(num_embeddings)) return AddPasses(keys.low, bits, passes);
  const int count = AddPasses(keys.low, RowKeys::kLowBits, passes);
  return count + AddPasses(keys.high, bits - RowKeys::kLowBits, passes + count);
}

}  // namespace

DensePlan MakeDensePlan(int64_t num_embeddings, int64_t dim, int64_t n, void* workspace) {
  SortPass passes[kMaxSortPasses];
  const int num_passes = MakePasses(num_embeddings, {}, passes);
  int max_bins = 1;
  for (int k = 0; k < num_passes; ++k) max_bins = std::max(max_bins, passes[k].bins);

  DensePlan plan;
  plan.n = n;
  plan.tiles = (n + kDenseTile - 1) / kDenseTile;
  const auto take = [&plan, workspace](auto** array, int64_t count) {
    using T = std::remove_pointer_t<std::remove_pointer_t<decltype(array)>>;
    constexpr int64_t kAlignment = 128;
    if (workspace != nullptr) *array = reinterpret_cast<T*>(static_cast<char*>(workspace) + plan.bytes);
    plan.bytes += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  };
  take(&plan.flags, kDenseFlags);
  take(&plan.keys.low, n);
  if (NeedsTwoWords(num_embeddings)) take(&plan.keys.high, n);
  take(&plan.bag_of, n);
  for (int32_t*& order : plan.orders) take(&order, n);
  take(&plan.head, plan.tiles + 1);
  take(&plan.row, n);
  take(&plan.bag, n);
  take(&plan.weight, n);
  take(&plan.partial, plan.tiles * dim);
  take(&plan.long_row, plan.tiles / 2);
  take(&plan.sorting, SortWorkspace(n, max_bins));
  return plan;
}

int64_t DenseWorkspace(std::string_view op, int64_t num_embeddings, int64_t dim, int64_t n) {
  return op == "forward" ? 0 : MakeDensePlan(num_embeddings, dim, n, nullptr).bytes;
}

Status ZeroWords(cudaStream_t stream, void* words, int64_t count) {
  if (count == 0) return {};  // there may be no address
  return ToStatus(cudaMemsetAsync(words, 0, static_cast<size_t>(count) * sizeof(int32_t), stream));
}

Status SortDenseBatch(cudaStream_t stream, const DenseBatch& batch, bool all_or_none, const DensePlan& plan) {
  JAX_TT_RETURN_IF_ERROR(ZeroWords(stream, plan.flags, kDenseFlags));
  const int64_t threads = std::max(plan.n, batch.groups * (batch.bags + 1));
  JAX_TT_RETURN_IF_ERROR(Launch(stream, DenseBlocks(threads), kDenseThreads, 0, MakeKeys, batch, plan));
  SortPass passes[kMaxSortPasses];
  int32_t* orders[kMaxSortPasses] = {};
  const int num_passes = MakePasses(batch.num_embeddings, plan.keys, passes);
  for (int k = 0; k < num_passes; ++k) orders[k] = plan.orders[k % 2];
  JAX_TT_RETURN_IF_ERROR(StableSort(stream, plan.n, passes, num_passes, orders, plan.sorting));
  const int32_t* order = orders[num_passes - 1];
  return Launch(stream, DenseBlocks((plan.tiles + 1) * kDenseTile), kDenseThreads, 0, MarkRows, batch, all_or_none,
                plan, order);
}

}  // namespace jax_tt
