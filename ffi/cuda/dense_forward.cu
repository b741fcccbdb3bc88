// Sums of the rows of a bag.
#include "ffi/core/sentinel.h"
#include "ffi/cuda/dense.h"
#include "ffi/cuda/dense_ids.h"
#include "ffi/cuda/dense_lanes.h"

namespace jax_tt {
namespace {

// Rows of a bag that are asked for before the first of them is added: a row comes from memory in several hundred
// cycles, whatever the number of rows under way.
constexpr int kRowsInFlight = 8;

// Adds the rows of positions [begin, end), in their order; returns whether one of them makes NaN of its bag.
template <typename T, int V>
__device__ __forceinline__ bool AddRows(const DenseBatch& batch, const T* table, int64_t begin, int64_t end, int column,
                                        Packet<float, V>* sum) {
  bool poisoned = false;
  for (int64_t position = begin; position < end; position += kRowsInFlight) {
    int64_t row[kRowsInFlight];
    for (int j = 0; j < kRowsInFlight; ++j) {
      row[j] = position + j < end ? ResolveId(batch, position + j) : kNoRow;
      poisoned |= row[j] == kPoisonedRow;
    }
    Packet<T, V> value[kRowsInFlight] = {};
    float weight[kRowsInFlight] = {};
    for (int j = 0; j < kRowsInFlight; ++j) {
      if (row[j] < 0) continue;
      value[j] = LoadPacket<V>(table + row[j] * batch.dim + column);
      weight[j] = batch.weights == nullptr ? 1.0f : batch.weights[position + j];
    }
    for (int j = 0; j < kRowsInFlight; ++j) {
      if (row[j] < 0) continue;
      for (int v = 0; v < V; ++v) sum->x[v] += weight[j] * ToCompute(value[j].x[v]);
    }
  }
  return poisoned;
}

template <int V>
__device__ __forceinline__ void WriteSum(Packet<float, V> sum, bool poisoned, float* out) {
  if (poisoned)
    for (int v = 0; v < V; ++v) sum.x[v] = BitsToFloat(0x7fc00000u);
  StorePacket(sum, out);
}

// Leaves a notice of an id of the bag that is out of range: reading the ids of the bag once more is cheap, they come
// from the cache when the rows are asked for.
__device__ __forceinline__ void NoteIds(const DenseBatch& batch, int64_t begin, int64_t end, int64_t first,
                                        int64_t stride) {
  if (batch.notice == nullptr) return;
  for (int64_t position = begin + first; position < end; position += stride)
    if (ResolveId(batch, position) == kNoticedRow)
      LeaveNotice(batch.notice, WrittenWholeId(batch.type, batch.ids, position, batch.padded), position);
}

// The lanes of a row take one bag, position after position.
template <typename T, int V>
__global__ void __launch_bounds__(kDenseThreads, 2)
    PoolRows(DenseBatch batch, RowLanes lanes, const T* table, const float* sentinel, float* out) {
  const int64_t bag = lanes.row();
  if (bag >= batch.total_bags()) return;
  const BagRange range = PositionsOf(batch, bag);
  const bool broken = !range.valid || !SentinelHolds(*sentinel);
  NoteIds(batch, range.begin, range.end, lanes.lane(), lanes.count);
  for (int column = lanes.lane() * V; column < batch.dim; column += lanes.count * V) {
    Packet<float, V> sum{};
    const bool poisoned = AddRows<T, V>(batch, table, range.begin, range.end, column, &sum);
    WriteSum(sum, broken || poisoned, out + bag * batch.dim + column);
  }
}

// A block takes one bag: its groups of lanes take equal runs of positions, and their sums are added in order.
template <typename T, int V>
__global__ void __launch_bounds__(kDenseThreads, 2)
    PoolRowsByBlock(DenseBatch batch, RowLanes lanes, const T* table, const float* sentinel, float* out) {
  SharedArena arena;
  const Shared<float> words = arena.Take<float>(kDenseThreads * V);
  const int64_t bag = blockIdx.x;
  const BagRange range = PositionsOf(batch, bag);
  const bool broken = !range.valid || !SentinelHolds(*sentinel);
  const int groups = kDenseThreads / lanes.count, group = static_cast<int>(threadIdx.x) / lanes.count;
  NoteIds(batch, range.begin, range.end, threadIdx.x, kDenseThreads);
  const int64_t run = (range.end - range.begin + groups - 1) / groups;
  const int64_t begin = min(range.end, range.begin + group * run), end = min(range.end, begin + run);
  for (int first = 0; first < batch.dim; first += lanes.count * V) {
    const int column = first + lanes.lane() * V;
    Packet<float, V> sum{};
    const bool poisoned = column < batch.dim && AddRows<T, V>(batch, table, begin, end, column, &sum);
    const bool any_poisoned = __syncthreads_or(poisoned) != 0;
    sum = SumOverBlock(lanes, sum, words);
    if (group == 0 && column < batch.dim) WriteSum(sum, broken || any_poisoned, out + bag * batch.dim + column);
  }
}

// Whether so few bags are so long that the lanes of a row, a bag each, would leave most of the device idle.  Decided by
// sizes alone, so that equal calls give equal bits.
bool ByBlock(const DenseBatch& batch, const RowLanes& lanes) {
  constexpr int64_t kLongBag = 64, kManyThreads = 1 << 16;
  return batch.total_bags() * lanes.count < kManyThreads && batch.n() >= batch.total_bags() * kLongBag;
}

template <int V, typename T>
Status LaunchPoolRows(cudaStream_t stream, const DenseBatch& batch, const T* table, const float* sentinel, float* out) {
  const RowLanes lanes = RowLanes::For(batch.dim, V);
  if (ByBlock(batch, lanes))
    return Launch(stream, batch.total_bags(), kDenseThreads, SharedBytes<float>(kDenseThreads * V),
                  PoolRowsByBlock<T, V>, batch, lanes, table, sentinel, out);
  return Launch(stream, lanes.blocks(batch.total_bags()), kDenseThreads, 0, PoolRows<T, V>, batch, lanes, table,
                sentinel, out);
}

}  // namespace

template <typename T>
Status DenseForward(cudaStream_t stream, const DenseBatch& batch, const T* table, const float* sentinel, float* out) {
  return FourWide(batch.dim, table, out) ? LaunchPoolRows<4>(stream, batch, table, sentinel, out)
                                         : LaunchPoolRows<1>(stream, batch, table, sentinel, out);
}

template Status DenseForward(cudaStream_t, const DenseBatch&, const float*, const float*, float*);
template Status DenseForward(cudaStream_t, const DenseBatch&, const bfloat16*, const float*, float*);
template Status DenseForward(cudaStream_t, const DenseBatch&, const float16*, const float*, float*);

}  // namespace jax_tt
