// Sums of output gradients over sorted positions, in their order.
#ifndef JAX_TT_CUDA_DENSE_SUM_H_
#define JAX_TT_CUDA_DENSE_SUM_H_

#include <stdint.h>

#include "ffi/cuda/dense_plan.h"
#include "ffi/cuda/dense_vectors.h"

namespace jax_tt {

// What gradients are summed from.
struct GradientSource {
  const GradientTable& table;
  const TablePlan& plan;
  int dim;
  bool weighted;

  __device__ __forceinline__ GradientSource(const GradientTable& table, const TablePlan& plan)
      : table(table), plan(plan), dim(static_cast<int>(table.batch.dim)), weighted(table.batch.weights != nullptr) {}
  // The gradient of the vector of a bag.
  template <int V>
  __device__ __forceinline__ Packet<float, V> At(int32_t bag, int column) const {
    return LoadVector<V>(table.out_gradient + table.vectors.at(bag, dim) + column, table.widths.vectors_aligned);
  }
};

// Adds kBatch rows of the output gradient, or the first `count` of them; all are asked for before the first is added.
template <int kBatch, int V>
__device__ __forceinline__ void AddPositions(const GradientSource& from, uint32_t begin, int count, int column,
                                             Packet<float, V>* sum) {
  int32_t bag[kBatch] = {};
  float weight[kBatch] = {};
  Packet<float, V> value[kBatch] = {};
  for (int j = 0; j < kBatch; ++j) {
    if (j >= count) continue;
    bag[j] = from.plan.bag[begin + j];
    weight[j] = from.weighted ? from.plan.weight[begin + j] : 1.0f;
  }
  for (int j = 0; j < kBatch; ++j)
    if (j < count) value[j] = from.At<V>(bag[j], column);
  for (int j = 0; j < kBatch; ++j)
    for (int v = 0; v < V; ++v)
      if (j < count) sum->x[v] += weight[j] * value[j].x[v];
}

// The sum over `count` sorted positions of a long row.
template <int V>
struct PositionSum {
  const GradientSource& from;
  uint32_t begin;
  int count;

  __device__ __forceinline__ ExactPacketSum<V> operator()(int column) const {
    constexpr int kBatch = 8;
    ExactPacketSum<V> sum;
    if (column >= from.dim) return sum;
    uint32_t i = begin;
    for (int left = count; left > 0; left -= kBatch, i += kBatch) {
      Packet<float, V> batch{};
      AddPositions<kBatch>(from, i, left, column, &batch);
      sum.Add(batch);
    }
    return sum;
  }
};

// Adds the sums of `count` pieces.
template <int kBatch, int V>
__device__ __forceinline__ void AddPieces(const GradientSource& from, int64_t first, int count, int column,
                                          ExactPacketSum<V>* sum) {
  const float* partial = from.plan.partial + first * from.dim + column;
  for (int i = 0; i < count; i += kBatch) {
    Packet<float, V> value[kBatch] = {};
    for (int j = 0; j < kBatch; ++j)
      if (i + j < count) value[j] = LoadPacket<V>(partial + static_cast<int64_t>(i + j) * from.dim);
    for (int j = 0; j < kBatch; ++j) sum->Add(value[j]);
  }
}

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_DENSE_SUM_H_
