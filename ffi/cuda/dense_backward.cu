// Gradients of a dense table and of the weights of its lookups.
#include "ffi/cuda/dense_backward.h"
#include "ffi/cuda/dense_ids.h"
#include "ffi/cuda/dense_long_rows.h"

namespace jax_tt {
namespace {

// Writes the gradients to the rows of a table.
struct GradientSink {
  float* gradient;

  template <int V, typename Sum>
  __device__ __forceinline__ void Row(const RowLanes& lanes, int64_t row, int dim, bool owner, const Sum& sum) const {
    for (int first = 0; first < dim; first += lanes.count * V) {
      const int column = first + lanes.lane() * V;
      const Packet<float, V> value = sum(column);
      if (owner && column < dim) StorePacket(value, gradient + row * dim + column);
    }
  }
  __device__ __forceinline__ void Finish(const int32_t*) const {}
};

// The lanes of a row take one position, in the order of the batch, whose bags keep their gradients in the cache.
template <typename T, int V>
__global__ void __launch_bounds__(kDenseThreads)
    DifferentiateWeights(DensePlan plan, RowLanes lanes, int dim, const T* table, const float* out_gradient,
                         float* weight_gradient) {
  const int64_t position = lanes.row();
  const bool exists = position < plan.n;
  const int32_t bag = exists && plan.flags[kBadOffsets] == 0 ? plan.bag_of[position] : -1;
  float dot = 0;
  if (bag >= 0) {
    const T* row = table + plan.keys.Get(position) * dim;
    const float* g = out_gradient + static_cast<int64_t>(bag) * dim;
    for (int column = lanes.lane() * V; column < dim; column += lanes.count * V) {
      const Packet<T, V> stored = LoadPacket<V>(row + column);
      const Packet<float, V> value = LoadPacket<V>(g + column);
      for (int v = 0; v < V; ++v) dot += ToCompute(stored.x[v]) * value.x[v];
    }
  }
  dot = lanes.Sum(dot);
  if (exists && lanes.lane() == 0)
    weight_gradient[position] = bag == DensePlan::kPoisoned ? __int_as_float(0x7fc00000) : dot;
}

template <int V, typename T>
Status LaunchWeights(cudaStream_t stream, const DensePlan& plan, int dim, const T* table, const float* out_gradient,
                     float* weight_gradient) {
  const RowLanes lanes = RowLanes::For(dim, V);
  return Launch(stream, lanes.blocks(plan.n), kDenseThreads, 0, DifferentiateWeights<T, V>, plan, lanes, dim, table,
                out_gradient, weight_gradient);
}

}  // namespace

template <typename T>
Status DenseWeightGradient(cudaStream_t stream, const DensePlan& plan, int dim, const T* table,
                           const float* out_gradient, float* weight_gradient) {
  return FourWide(dim, table, out_gradient) ? LaunchWeights<4>(stream, plan, dim, table, out_gradient, weight_gradient)
                                            : LaunchWeights<1>(stream, plan, dim, table, out_gradient, weight_gradient);
}

template <typename T>
Status DenseBackward(cudaStream_t stream, const DenseBatch& batch, const T* table, const float* out_gradient,
                     float* gradient, float* weight_gradient, void* workspace) {
  const DensePlan plan = MakeDensePlan(batch.num_embeddings, batch.dim, batch.n(), workspace);
  JAX_TT_RETURN_IF_ERROR(SortDenseBatch(stream, batch, /*all_or_none=*/false, plan));
  JAX_TT_RETURN_IF_ERROR(ZeroWords(stream, gradient, batch.num_embeddings * batch.dim));
  const GradientSink sink{gradient};
  JAX_TT_RETURN_IF_ERROR(FourWide(batch.dim, out_gradient, gradient)
                             ? SumAllRows<4>(stream, plan, batch, out_gradient, /*parts=*/true, sink)
                             : SumAllRows<1>(stream, plan, batch, out_gradient, /*parts=*/true, sink));
  if (weight_gradient == nullptr) return {};
  return DenseWeightGradient(stream, plan, static_cast<int>(batch.dim), table, out_gradient, weight_gradient);
}

#define JAX_TT_INSTANTIATE(T)                                                                               \
  template Status DenseWeightGradient(cudaStream_t, const DensePlan&, int, const T*, const float*, float*); \
  template Status DenseBackward(cudaStream_t, const DenseBatch&, const T*, const float*, float*, float*, void*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
