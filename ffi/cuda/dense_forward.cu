// Sums of the rows of a bag.
#include "ffi/cuda/dense.h"
#include "ffi/cuda/dense_ids.h"
#include "ffi/cuda/dense_lanes.h"

namespace jax_tt {
namespace {

// Rows of a bag that are asked for before the first of them is added: a row comes from memory in several hundred
// cycles, whatever the number of rows under way.
constexpr int kRowsInFlight = 8;

// The lanes of a row take one bag, position after position.
template <typename T, int V>
__global__ void __launch_bounds__(kDenseThreads)
    PoolRows(DenseBatch batch, RowLanes lanes, const T* table, const float* sentinel, float* out) {
  const int64_t bag = lanes.row();
  if (bag >= batch.total_bags()) return;
  const BagRange range = PositionsOf(batch, bag);
  bool poisoned = !range.valid || *sentinel != 1.0f;
  for (int column = lanes.lane() * V; column < batch.dim; column += lanes.count * V) {
    Packet<float, V> sum{};
    for (int64_t position = range.begin; position < range.end; position += kRowsInFlight) {
      int64_t row[kRowsInFlight];
      for (int j = 0; j < kRowsInFlight; ++j) {
        row[j] = position + j < range.end ? ResolveId(batch, position + j) : kNoRow;
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
        for (int v = 0; v < V; ++v) sum.x[v] += weight[j] * ToCompute(value[j].x[v]);
      }
    }
    if (poisoned)
      for (int v = 0; v < V; ++v) sum.x[v] = BitsToFloat(0x7fc00000u);
    StorePacket(sum, out + bag * batch.dim + column);
  }
}

template <int V, typename T>
Status LaunchPoolRows(cudaStream_t stream, const DenseBatch& batch, const T* table, const float* sentinel, float* out) {
  const RowLanes lanes = RowLanes::For(batch.dim, V);
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
