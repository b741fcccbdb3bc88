#include "ffi/cpu/tt_backward.h"

#include <algorithm>
#include <vector>

#include "ffi/cpu/plan.h"
#include "ffi/cpu/tt_chain_gradient.h"
#include "ffi/cpu/tt_passes.h"

namespace jax_tt {
namespace {

template <typename T>
class Backward {
 public:
  using C = typename TTProblem<T>::C;

  Backward(const TTProblem<T>& problem, const Pool& pool, const C* out_gradient, const C* saved,
           const CoreGradients<C>& gradients, C* weight_gradient)
      : problem_(problem),
        pool_(pool),
        out_gradient_(out_gradient),
        saved_(saved),
        gradients_(gradients),
        weight_gradient_(weight_gradient),
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
    join_.RequestBuffers(max_rows, workspace_);
    primary_.RequestBuffers(max_rows, workspace_);
    secondary_.RequestBuffers(max_rows, workspace_);
    for (size_t w = 0; w < column_scratch_.size(); ++w) {
      workspace_.Request(&column_scratch_[w], shape.dim());
      workspace_.Request(&tile_scratch_[w], join_.tile_nodes() * side.product_size(side.depth));
    }
    if (Status status = workspace_.Allocate(); !status.ok()) return status;
    if (!gradients_.consume)
      for (int k = 0; k < shape.d; ++k) std::fill_n(gradients_.touched[k], shape.p[k], 0);
    if (weight_gradient_ != nullptr) ClearWeightGradient(problem_.layout, problem_.plan, weight_gradient_);
    for (int64_t c = 0, begin = 0; c < problem_.num_chunks(); ++c) {
      chunk_begin_ = begin;
      Phases phases;
      join_.Open(c, begin, weight_gradient_ != nullptr, phases);
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
    const int depth = join_.primary().depth();
    if (depth == 1) {
      const int64_t node = group.begin;
      C* gradient = tile_scratch_[static_cast<size_t>(worker)];
      Tile(node, node + 1, join_.primary().product(1, node), lane, worker, gradient);
      primary_.Store(1, group.slice, gradient, worker);
      return;
    }
    typename ChainGradient<T>::SliceGradient slice_gradient(primary_, depth, group, lane, worker);
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
      if (weight_gradient_ != nullptr) WeightGradient(row, product, worker);
    });
  }

  // Sum over the row's positions of weight times bag gradient, with columns in the order of the joined block.
  const C* RowGradient(int64_t row, int worker) {
    const int64_t dim = problem_.shape.dim();
    const PlanLayout& layout = problem_.layout;
    const int32_t* order = layout.order(problem_.plan);
    const int32_t* bag = layout.bag(problem_.plan);
    const auto [begin, end] = Positions(row);
    const C* sum;
    if (end - begin == 1 && problem_.weights == nullptr) {
      sum = out_gradient_ + bag[order[begin]] * dim;
    } else {
      C* columns = column_scratch_[static_cast<size_t>(worker)];
      std::fill_n(columns, dim, C{0});
      for (int64_t i = begin; i < end; ++i)
        join_.kernels().axpy(dim, problem_.weight(order[i]), out_gradient_ + bag[order[i]] * dim, columns);
      sum = columns;
    }
    if (join_.identity_order()) return sum;
    C* block = join_.row_scratch(worker);
    for (int64_t i = 0; i < dim; ++i) block[i] = sum[join_.columns()[static_cast<size_t>(i)]];
    return block;
  }

  void WeightGradient(int64_t row, const C* product, int worker) {
    const int64_t dim = problem_.shape.dim();
    C* values = column_scratch_[static_cast<size_t>(worker)];
    join_.JoinRow(row, product, worker, values);
    const int32_t* order = problem_.layout.order(problem_.plan);
    const int32_t* bag = problem_.layout.bag(problem_.plan);
    const auto [begin, end] = Positions(row);
    for (int64_t i = begin; i < end; ++i)
      weight_gradient_[order[i]] = join_.kernels().dot(dim, values, out_gradient_ + bag[order[i]] * dim);
  }

  std::pair<int64_t, int64_t> Positions(int64_t row) const {
    const int32_t* row_end = problem_.layout.row_end(problem_.plan);
    const int64_t global = chunk_begin_ + row;
    return {global == 0 ? 0 : row_end[global - 1], row_end[global]};
  }

  const TTProblem<T>& problem_;
  const Pool& pool_;
  const C* out_gradient_;
  const C* saved_;
  const CoreGradients<C>& gradients_;
  C* weight_gradient_;
  Workspace workspace_;
  Join<T> join_;
  ChainGradient<T> primary_, secondary_;
  std::vector<C*> column_scratch_, tile_scratch_;
  int64_t chunk_begin_ = 0;
};

}  // namespace

template <typename T>
Status TTBackward(const TTProblem<T>& problem, const Pool& pool, const typename TTProblem<T>::C* out_gradient,
                  const typename TTProblem<T>::C* saved, const CoreGradients<typename TTProblem<T>::C>& gradients,
                  typename TTProblem<T>::C* weight_gradient) {
  return Backward<T>(problem, pool, out_gradient, saved, gradients, weight_gradient).Run();
}

#define JAX_TT_INSTANTIATE(T, C) \
  template Status TTBackward(const TTProblem<T>&, const Pool&, const C*, const C*, const CoreGradients<C>&, C*)
JAX_TT_INSTANTIATE(float, float);
JAX_TT_INSTANTIATE(double, double);
JAX_TT_INSTANTIATE(bfloat16, float);
JAX_TT_INSTANTIATE(float16, float);

}  // namespace jax_tt
