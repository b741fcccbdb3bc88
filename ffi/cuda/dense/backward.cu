// Gradients of dense tables and of the weights of their lookups.
#include <utility>

#include "ffi/cuda/dense/backward.h"
#include "ffi/cuda/dense/ids.h"
#include "ffi/cuda/dense/long_rows.h"
#include "ffi/cuda/dense/rows.h"
#include "ffi/cuda/dense/widths.h"

namespace jax_tt {
namespace {

// Elements of a gradient that one block sets to zero.
constexpr int64_t kClearedByBlock = 16 * kDenseThreads;

__global__ void __launch_bounds__(kDenseThreads)
    ClearGradients(const __grid_constant__ TableList<GradientTable> tables) {
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const int64_t first = block.index * kClearedByBlock;
  const int64_t end = min(first + kClearedByBlock, table.batch.num_embeddings * table.batch.dim);
  for (int64_t i = first + threadIdx.x; i < end; i += kDenseThreads) table.gradient[i] = 0;
}

// Writes the gradients to the rows of a table.
struct GradientSink {
  static constexpr int Blocks(int) { return 4; }

  float* gradient;

  __device__ __forceinline__ GradientSink(const GradientTable& table, const TablePlan&) : gradient(table.gradient) {}

  template <int V>
  __device__ __forceinline__ void Row(const RowLanes& lanes, int64_t row, int dim, bool owner,
                                      const RowSum<V>& sum) const {
    for (int first = 0; first < dim; first += lanes.count * V) {
      const int column = first + lanes.lane() * V;
      const Packet<float, V> value = sum(column);
      if (owner && column < dim) StorePacket(value, gradient + row * dim + column);
    }
  }
  __device__ __forceinline__ bool Skips() const { return false; }
  __device__ __forceinline__ void Finish(bool) const {}
};

// The lanes of a row take one position, in the order of the batch, whose bags keep their gradients in the cache.
template <typename T, int V>
__global__ void __launch_bounds__(kDenseThreads, 5)
    DifferentiateWeights(const __grid_constant__ TableList<GradientTable> tables,
                         const __grid_constant__ DensePlan all) {
  BlockOfTable block;
  const GradientTable table = tables.Find(&block);
  const TablePlan plan = all.Of(table);
  const GradientSource from(table, plan);
  const RowLanes lanes = RowLanes::For(from.dim, V);
  const int64_t position = lanes.row(block.index);
  const bool exists = position < plan.n;
  const int32_t bag = plan.Has(kBadOffsets) || !exists ? -1 : BagOf(table.batch, position);
  const int64_t row_of = bag < 0 ? kNoRow : ResolveId(table.batch, position);
  float dot = 0;
  if (row_of >= 0) {
    const T* row = static_cast<const T*>(table.values) + row_of * from.dim;
    for (int column = lanes.lane() * V; column < from.dim; column += lanes.count * V) {
      const Packet<T, V> stored = LoadPacket<V>(row + column);
      const Packet<float, V> value = from.At<V>(bag, column);
      for (int v = 0; v < V; ++v) dot += ToCompute(stored.x[v]) * value.x[v];
    }
  }
  dot = lanes.Sum(dot);
  if (exists && lanes.lane() == 0)
    table.weight_gradient[position] = row_of == kPoisonedRow ? __int_as_float(0x7fc00000) : dot;
}

template <int V>
void AddGradients(const DensePlan& plan, GradientLaunches& launches) {
  const auto takes = [](const GradientTable& table) { return table.widths.four_wide == (V == 4); };
  AddSumRows(kSumRows<V, GradientSink>, V, takes, plan, launches);
}

}  // namespace

Status AddWeightGradients(const DensePlan& plan, GradientLaunches& launches) {
  return ForEachWidth([&](auto storage, auto width) -> Status {
    using T = typename decltype(storage)::type;
    constexpr int V = decltype(width)::value;
    launches.Add(
        [](const GradientTable& table) {
          return table.weight_gradient != nullptr && table.storage == kStorage<T> && table.widths.four_wide == (V == 4);
        },
        [](const GradientTable& table) { return RowLanes::For(table.batch.dim, V).blocks(table.batch.n()); },
        [plan](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
          return Launch(stream, on.blocks, kDenseThreads, 0, DifferentiateWeights<T, V>, on.tables, plan);
        });
    return {};
  });
}

Status DenseBackward(cudaStream_t stream, std::vector<GradientTable> tables, void* workspace) {
  DensePlan plan;
  JAX_TT_RETURN_IF_ERROR(MakeDensePlan(&tables, /*all_or_none=*/false, workspace, &plan));
  for (GradientTable& table : tables) {
    table.widths = WidthsOf(table, table.out_gradient, 0);
    table.widths.four_wide &= IsAligned(table.gradient, 4 * sizeof(float));
  }
  GradientLaunches launches(std::move(tables), static_cast<char*>(workspace) + plan.bytes);
  AddPlan(plan, launches);
  launches.Add([](const GradientTable&) { return true; },
               [](const GradientTable& table) {
                 return (table.batch.num_embeddings * table.batch.dim + kClearedByBlock - 1) / kClearedByBlock;
               },
               [](cudaStream_t stream, const TableLaunch<GradientTable>& on) {
                 return Launch(stream, on.blocks, kDenseThreads, 0, ClearGradients, on.tables);
               });
  AddLongRows(plan, launches);
  AddGradients<4>(plan, launches);
  AddGradients<1>(plan, launches);
  JAX_TT_RETURN_IF_ERROR(AddWeightGradients(plan, launches));
  return launches.Run(stream);
}

}  // namespace jax_tt
