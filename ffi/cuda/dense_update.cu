// The fused update of a dense table: the gradient of a row goes into its optimizer step without passing through memory.
#include "ffi/core/stochastic.h"
#include "ffi/cuda/dense_backward.h"
#include "ffi/cuda/dense_long_rows.h"
#include "ffi/cuda/table_step.h"

namespace jax_tt {
namespace {

// Sets a flag when any gradient is infinite or NaN.
struct FiniteSink {
  const float* scale;
  int32_t* flags;

  template <int V, typename Sum>
  __device__ __forceinline__ void Row(const RowLanes& lanes, int64_t, int dim, bool owner, const Sum& sum) const {
    float probe = 0;  // a sum of products with zero is zero unless one of them is infinite or NaN
    for (int first = 0; first < dim; first += lanes.count * V) {
      const Packet<float, V> gradient = sum(first + lanes.lane() * V);
      for (int v = 0; v < V; ++v) probe += (*scale * gradient.x[v]) * 0.0f;
    }
    if (owner && probe != 0.0f) atomicOr(flags + kNonFinite, 1);
  }
  __device__ __forceinline__ void Finish(const int32_t*) const {}
};

// Takes the optimizer step of a row in place.
template <typename T, typename Rule>
struct StepSink {
  DenseTable<T> table;
  DenseStep step;
  const int32_t* flags;
  float* applied;

  template <int V, typename Sum>
  __device__ __forceinline__ void Row(const RowLanes& lanes, int64_t row, int dim, bool owner, const Sum& sum) const {
    if (step.scale[1] == 0.0f || (step.skip_nonfinite && flags[kNonFinite] != 0)) return;
    const Rule rule(step.hyper);
    const float scale = *step.scale;
    const RowRounding rounding(step.seed, /*table=*/0, row, step.stochastic_rounding);
    Packet<float, V> gradient{};
    float row_step = 0;
    if constexpr (Rule::kRowWise) {
      float squares = 0;
      for (int first = 0; first < dim; first += lanes.count * V) {
        gradient = sum(first + lanes.lane() * V);
        for (int v = 0; v < V; ++v) squares += (scale * gradient.x[v]) * (scale * gradient.x[v]);
      }
      squares = lanes.Sum(squares);
      if (owner && lanes.lane() == 0)
        row_step = rule.RowStep(dim == 0 ? 0.0f : squares / static_cast<float>(dim), table.slots[0] + row);
      row_step = lanes.OfFirst(row_step);
    }
    for (int first = 0; first < dim; first += lanes.count * V) {
      const int column = first + lanes.lane() * V;
      const int64_t element = row * dim + column;
      const bool writes = owner && column < dim;
      // The row and its slots are asked for before the gradient is summed, not after.
      Packet<T, V> stored{};
      Packet<float, V> slot[2] = {};
      if (writes) {
        stored = LoadPacket<V>(table.values + element);
        for (int s = 0; s < Rule::kElementSlots; ++s) slot[s] = LoadPacket<V>(table.slots[s] + element);
      }
      // A row-wise rule has the gradient already, if these are the only columns.
      if (!Rule::kRowWise || dim > lanes.count * V) gradient = sum(column);
      if (!writes) continue;
      for (int v = 0; v < V; ++v) {
        const float value =
            rule.Step(ToCompute(stored.x[v]), scale * gradient.x[v], row_step, &slot[0].x[v], &slot[1].x[v]);
        rounding.Store(value, column + v, &stored.x[v]);
      }
      StorePacket(stored, table.values + element);
      for (int s = 0; s < Rule::kElementSlots; ++s) StorePacket(slot[s], table.slots[s] + element);
    }
  }
  __device__ __forceinline__ void Finish(const int32_t* flags) const {
    *applied = (flags[kNonFinite] | flags[kBadOffsets] | flags[kBadIds]) == 0 ? 1.0f : 0.0f;
  }
};

struct UpdateArgs {
  const DensePlan& plan;
  const DenseBatch& batch;
  const float* out_gradient;
  const DenseStep& step;
  float* applied;
};

template <int V, typename T, template <typename> class Rule>
Status StepAllRows(cudaStream_t stream, const UpdateArgs& args, const DenseTable<T>& table) {
  const StepSink<T, Rule<float>> sink{table, args.step, args.plan.flags, args.applied};
  return SumAllRows<V>(stream, args.plan, args.batch, args.out_gradient, /*parts=*/!args.step.skip_nonfinite, sink);
}

template <int V, typename T>
Status UpdateRows(cudaStream_t stream, const UpdateArgs& args, const DenseTable<T>& table) {
  if (args.step.skip_nonfinite) {
    const FiniteSink check{args.step.scale, args.plan.flags};
    JAX_TT_RETURN_IF_ERROR(SumAllRows<V>(stream, args.plan, args.batch, args.out_gradient, /*parts=*/true, check));
  }
  return DispatchRule(args.step.kind,
                      [&](auto tag) { return StepAllRows<V, T, decltype(tag)::template Rule>(stream, args, table); });
}

}  // namespace

template <typename T>
Status DenseUpdate(cudaStream_t stream, const DenseBatch& batch, const DenseTable<T>& table, const float* out_gradient,
                   const DenseStep& step, float* weight_gradient, float* applied, void* workspace) {
  const DensePlan plan = MakeDensePlan(batch.num_embeddings, batch.dim, batch.n(), workspace);
  JAX_TT_RETURN_IF_ERROR(SortDenseBatch(stream, batch, /*all_or_none=*/true, plan));
  if (weight_gradient != nullptr) {
    JAX_TT_RETURN_IF_ERROR(
        DenseWeightGradient(stream, plan, static_cast<int>(batch.dim), table.values, out_gradient, weight_gradient));
  }
  const UpdateArgs args{plan, batch, out_gradient, step, applied};
  bool four_wide = FourWide(batch.dim, table.values, out_gradient);
  for (int s = 0; s < kOptimizers[step.kind].element_slots; ++s) four_wide &= FourWide(batch.dim, table.slots[s]);
  return four_wide ? UpdateRows<4>(stream, args, table) : UpdateRows<1>(stream, args, table);
}

#define JAX_TT_INSTANTIATE(T)                                                                                        \
  template Status DenseUpdate(cudaStream_t, const DenseBatch&, const DenseTable<T>&, const float*, const DenseStep&, \
                              float*, float*, void*)
JAX_TT_INSTANTIATE(float);
JAX_TT_INSTANTIATE(bfloat16);
JAX_TT_INSTANTIATE(float16);

}  // namespace jax_tt
