#include "ffi/cpu/tt/backward.h"

#include <algorithm>
#include <vector>

#include "ffi/cpu/tt/chain_gradient.h"
#include "ffi/cpu/tt/pair_backward.h"
#include "ffi/cpu/tt/passes.h"
#include "ffi/cpu/tt/row_gradients.h"
#include "ffi/cpu/tt_plan/plan.h"

namespace jax_tt {
namespace {

template <typename T>
class Backward {
 public:
  using C = typename TTProblem<T>::C;

  Backward(const TTProblem<T>& problem, const Pool& pool, const C* saved, const CoreGradients<C>& gradients,
           const RowGradients<T>& row_gradients)
      : problem_(problem),
        pool_(pool),
        saved_(saved),
        gradients_(gradients),
        rows_(row_gradients),
        join_(problem, pool.workers),
        primary_(problem, join_.primary(), join_.primary().depth() - 1, join_.primary().depth() == 2, pool.workers,
                 join_.tile_nodes(), gradients),
        secondary_(problem, join_.secondary(), join_.secondary().depth(), join_.secondary().depth() == 1, pool.workers,
                   join_.tile_nodes(), gradients),
        column_scratch_(static_cast<size_t>(pool.workers)),
        tile_scratch_(static_cast<size_t>(pool.workers)) {}

  Status Run() {
    const TTShape& shape = problem_.shape;
    const int64_t max_rows = std::min(problem_.layout.chunk_rows, problem_.num_rows());
    const Side& side = join_.primary().side();
    rows_.RequestBuffers(pool_.workers, workspace_);
    join_.RequestBuffers(max_rows, workspace_);
    primary_.RequestBuffers(max_rows, workspace_);
    secondary_.RequestBuffers(max_rows, workspace_);
    for (size_t w = 0; w < column_scratch_.size(); ++w) {
      workspace_.Request(&column_scratch_[w], shape.dim());
      workspace_.Request(&tile_scratch_[w], join_.tile_nodes() * side.product_size(side.depth));
    }
    if (Status status = workspace_.Allocate(); !status.ok()) return status;
    for (int64_t c = 0, begin = 0; c < problem_.num_chunks(); ++c) {
      rows_.Open(begin);
      Phases phases;
      join_.Open(c, begin, rows_.wants_weights(), phases);
      const int64_t rows = problem_.layout.chunk(problem_.plan, c)[0] - begin;
      const int64_t lanes = std::min({primary_.MaxLanes(rows), secondary_.MaxLanes(rows), join_.num_groups()});
      primary_.OpenLanes(lanes);
      secondary_.OpenLanes(lanes);
      join_.AddLanePhase(lanes, phases,
                         [this](const SliceGroup& group, int64_t lane, int worker) { Group(group, lane, worker); });
      secondary_.AddPhases(phases);
      primary_.AddPhases(phases);
      pool_.Run(phases);
      begin = problem_.layout.chunk(problem_.plan, c)[0];
    }
    return {};
  }

 private:
  using LaneSum = typename ChainGradient<T>::LaneSum;

  // Computes the node gradients of the primary side's deepest level from the rows, and from them that of the slice.
  void Group(const SliceGroup& group, int64_t lane, int worker) {
    typename ChainGradient<T>::SliceGradient slice_gradient(primary_, join_.primary().depth(), group, lane, worker);
    join_.ForEachTile(group, worker, [&](int64_t begin, int64_t end, const C* slice) {
      const C* products =
          join_.Products(begin, end, slice, worker, const_cast<C*>(saved_), /*have_saved=*/saved_ != nullptr);
      C* gradient = tile_scratch_[static_cast<size_t>(worker)];
      Tile(begin, end, products, lane, worker, gradient);
      slice_gradient.Add(begin, end, gradient);
    });
  }

  // For row = a b with gradient g: d a += g b^T, and d b = a^T g goes to the secondary side.  gradient: [nodes, a].
  void Tile(int64_t node_begin, int64_t node_end, const C* products, int64_t lane, int worker, C* gradient) {
    const Side& a = join_.primary().side();
    const Side& b = join_.secondary().side();
    const int64_t rows = a.width[a.depth], cols = b.width[b.depth], rank = a.rank[a.depth];
    const int64_t a_size = a.product_size(a.depth), b_size = b.product_size(b.depth);
    int64_t last_node = -1;
    join_.ForEachRow(node_begin, node_end, products, [&](int64_t row, int64_t node, const C* product) {
      const C* g = RowGradient(row, worker);
      const LaneSum share = secondary_.by_lane() ? secondary_.ClaimLane(lane, join_.secondary_node(row))
                                                 : LaneSum{secondary_.child(b.depth) + row * b_size, false};
      join_.kernels().join_gradient(rows, cols, rank, g, product,
                                    join_.secondary().product(b.depth, join_.secondary_node(row)),
                                    gradient + (node - node_begin) * a_size, /*add_a=*/node == last_node, share.sum,
                                    /*add_b=*/share.add);
      last_node = node;
      if (rows_.wants_weights()) {
        C* values = column_scratch_[static_cast<size_t>(worker)];
        join_.JoinRow(row, product, worker, values);
        rows_.SetWeights(row, values);
      }
    });
  }

  // The gradient of a row with columns in the order of the joined block.
  const C* RowGradient(int64_t row, int worker) {
    const C* sum = rows_.Sum(row, column_scratch_[static_cast<size_t>(worker)], worker);
    if (join_.identity_order()) return sum;
    C* block = join_.row_scratch(worker);
    for (int64_t i = 0; i < problem_.shape.dim(); ++i) block[i] = sum[join_.columns()[static_cast<size_t>(i)]];
    return block;
  }

  const TTProblem<T>& problem_;
  const Pool& pool_;
  const C* saved_;
  const CoreGradients<C>& gradients_;
  RowGradients<T> rows_;
  Workspace workspace_;
  Join<T> join_;
  ChainGradient<T> primary_, secondary_;
  std::vector<C*> column_scratch_, tile_scratch_;
};

}  // namespace

template <typename T>
Status TTBackward(const TTProblem<T>& problem, const Pool& pool, const typename TTProblem<T>::C* out_gradient,
                  const typename TTProblem<T>::C* saved, const CoreGradients<typename TTProblem<T>::C>& gradients,
                  typename TTProblem<T>::C* weight_gradient) {
  if (!gradients.consume)
    for (int k = 0; k < problem.shape.d; ++k) std::fill_n(gradients.touched[k], problem.shape.p[k], 0);
  if (weight_gradient != nullptr) ClearWeightGradient(problem.layout, problem.plan, weight_gradient);
  const RowGradients<T> rows(problem, out_gradient, weight_gradient);
  if (problem.shape.d == 2) return PairBackward<T>(problem, pool, gradients, rows).Run();
  return Backward<T>(problem, pool, saved, gradients, rows).Run();
}

#define JAX_TT_INSTANTIATE(T, C) \
  template Status TTBackward(const TTProblem<T>&, const Pool&, const C*, const C*, const CoreGradients<C>&, C*)
JAX_TT_INSTANTIATE(float, float);
JAX_TT_INSTANTIATE(double, double);
JAX_TT_INSTANTIATE(bfloat16, float);
JAX_TT_INSTANTIATE(float16, float);

}  // namespace jax_tt
