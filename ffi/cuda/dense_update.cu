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
    RowWords<Rule> of_row{};
    if constexpr (kStepsRows<Rule>) of_row.row = Start<V>(lanes, rule, row, dim, owner, scale, sum, &gradient);
    for (int first = 0; first < dim; first += lanes.count * V) {
      const int column = first + lanes.lane() * V;
      const bool writes = owner && column < dim;
      // The row and its slots are asked for before the gradient is summed, not after.
      Stored<V> stored;
      if (writes) stored.Load(table, row * dim + column);
      // A rule with sums has the gradient already, if these are the only columns.
      if (Rule::kSums == 0 || dim > lanes.count * V) gradient = sum(column);
      if (!writes) continue;
      for (int v = 0; v < V; ++v) {
        float slots[kElementSlotsOrOne<Rule>] = {};
        stored.Slots(v, slots);
        const float value = rule.Step(ToCompute(stored.values.x[v]), scale * gradient.x[v], of_row.row, slots);
        for (int s = 0; s < Rule::kElementSlots; ++s) stored.slot[s].x[v] = slots[s];
        rounding.Store(value, column + v, &stored.values.x[v]);
      }
      StorePacket(stored.values, table.values + row * dim + column);
      for (int s = 0; s < Rule::kElementSlots; ++s) StorePacket(stored.slot[s], table.slots[s] + row * dim + column);
    }
  }
  __device__ __forceinline__ void Finish(const int32_t* flags) const {
    *applied = (flags[kNonFinite] | flags[kBadOffsets] | flags[kBadIds]) == 0 ? 1.0f : 0.0f;
  }

 private:
  // V elements of a row with their slots.
  template <int V>
  struct Stored {
    Packet<T, V> values{};
    Packet<float, V> slot[kElementSlotsOrOne<Rule>] = {};

    __device__ __forceinline__ void Load(const DenseTable<T>& table, int64_t element) {
      values = LoadPacket<V>(table.values + element);
      for (int s = 0; s < Rule::kElementSlots; ++s) slot[s] = LoadPacket<V>(table.slots[s] + element);
    }
    __device__ __forceinline__ void Slots(int v, float* slots) const {
      for (int s = 0; s < Rule::kElementSlots; ++s) slots[s] = slot[s].x[v];
    }
  };

  // The sums over the row and its RowStep; the gradient of the last columns is kept.  Every lane gets what it returns.
  template <int V, typename Sum>
  __device__ __forceinline__ typename Rule::Row Start(const RowLanes& lanes, const Rule& rule, int64_t row, int dim,
                                                      bool owner, float scale, const Sum& sum,
                                                      Packet<float, V>* gradient) const {
    float sums[kSumsOrOne<Rule>] = {};
    if constexpr (Rule::kSums > 0) {
      for (int first = 0; first < dim; first += lanes.count * V) {
        const int column = first + lanes.lane() * V;
        *gradient = sum(column);
        if (!owner || column >= dim) continue;
        Stored<V> stored;
        stored.Load(table, row * dim + column);
        for (int v = 0; v < V; ++v) {
          float slots[kElementSlotsOrOne<Rule>] = {};
          stored.Slots(v, slots);
          rule.Add(ToCompute(stored.values.x[v]), scale * gradient->x[v], slots, sums);
        }
      }
      for (float& value : sums) value = lanes.Sum(value);
    }
    RowWords<Rule> of_row{};
    if (owner && lanes.lane() == 0) {
      float* slots[kMaxSlots] = {};
      for (int s = 0; s < Rule::kRowSlots; ++s) slots[s] = table.slots[Rule::kElementSlots + s] + row;
      of_row.row = RowStepInPlace(rule, static_cast<float>(dim), sums, slots);
    }
    for (int k = 0; k < RowWords<Rule>::kCount; ++k) of_row.word[k] = lanes.OfFirst(of_row.word[k]);
    return of_row.row;
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
