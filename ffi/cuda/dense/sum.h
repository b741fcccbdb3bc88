// Sums of output gradients over sorted positions, in their order.
#pragma once

#include <stdint.h>

#include "ffi/cuda/dense/plan.h"
#include "ffi/cuda/dense/vectors.h"

namespace jax_tt {

// What gradients are summed from.
struct GradientSource {
  const GradientTable& table;
  const TablePlan& plan;
  int dim;
  bool weighted;

  __device__ __forceinline__ GradientSource(const GradientTable& table, const TablePlan& plan)
      : table(table),
        plan(plan),
        dim(static_cast<int>(table.batch.dim)),
        weighted(table.batch.weights != nullptr),
        first_(table.out_gradient),
        stride_(table.vectors.columns == nullptr ? dim : table.vectors.stride) {
    const BagVectors& vectors = table.vectors;
    if (vectors.columns == nullptr || vectors.bags > table.batch.total_bags()) return;
    of_first_ = static_cast<uint32_t>(vectors.bags);
    if (of_first_ > 0) first_ += vectors.columns[0];
  }
  // The gradient of the vector of a bag.
  template <int V>
  __device__ __forceinline__ Packet<float, V> At(int32_t bag, int column) const {
    const auto narrow = static_cast<uint32_t>(bag);
    const float* const vector =
        narrow < of_first_ ? first_ + narrow * stride_ : table.out_gradient + table.vectors.BehindFirst(bag);
    return LoadVector<V>(vector + column, table.widths.vectors_aligned);
  }

 private:
  // Vectors of so many bags, most often of all, begin at equal distances.
  const float* first_;
  int64_t stride_;
  uint32_t of_first_ = UINT32_MAX;
};

// Adds kBatch rows of the output gradient, or the first `count` of them; all are asked for before the first is added.
template <int kBatch, int V>
__device__ __forceinline__ void AddPositions(const GradientSource& from, uint32_t begin, int count, int column,
                                             Packet<float, V>* sum) {
  const int32_t* const bags = from.plan.bag + begin;
  const float* const weights = from.plan.weight + begin;
  int32_t bag[kBatch] = {};
  float weight[kBatch] = {};
  Packet<float, V> value[kBatch] = {};
  for (int j = 0; j < kBatch; ++j) {
    if (j >= count) continue;
    bag[j] = bags[j];
    weight[j] = from.weighted ? weights[j] : 1.0f;
  }
  for (int j = 0; j < kBatch; ++j)
    if (j < count) value[j] = from.At<V>(bag[j], column);
  for (int j = 0; j < kBatch; ++j)
    for (int v = 0; v < V; ++v)
      if (j < count) sum->x[v] += weight[j] * value[j].x[v];
}

// The sum over `count` sorted positions of a long row, kBatch of which are asked for at once.
template <int kBatch, int V>
struct PositionSum {
  const GradientSource& from;
  uint32_t begin;
  int count;

  __device__ __forceinline__ ExactPacketSum<V> operator()(int column) const {
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
