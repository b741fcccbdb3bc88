#include "ffi/cpu/dense.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "ffi/cpu/pool_bags.h"

namespace jax_tt {
namespace {

constexpr int64_t kBlock = 64;

// The distinct rows of a batch, each with the sum of the gradients of its positions.
template <typename T>
class RowGradients {
 public:
  using C = typename DenseProblem<T>::C;

  RowGradients(const DenseProblem<T>& problem, const Pool& pool, const C* out_gradient)
      : problem_(problem),
        layout_(MakeDenseLayout(problem.lookups.size())),
        out_gradient_(out_gradient),
        sum_(static_cast<size_t>(pool.workers)),
        value_(static_cast<size_t>(pool.workers)) {}

  Status Prepare() {
    workspace_.Request(&plan_, layout_.size());
    for (size_t w = 0; w < sum_.size(); ++w) {
      workspace_.Request(&sum_[w], problem_.dim);
      workspace_.Request(&value_[w], problem_.dim);
    }
    if (Status status = workspace_.Allocate(); !status.ok()) return status;
    return BuildDensePlan(problem_.num_embeddings, problem_.lookups, plan_);
  }

  // Adds a phase that calls fn(table row, gradient, worker) for every distinct row.
  template <typename Fn>
  void AddPhase(Phases& phases, Fn fn) {
    const int64_t rows = layout_.header(plan_)[PlanLayout::kRows];
    phases.AddBlocks(rows, kBlock, [this, rows, fn](int64_t row, int64_t end, int worker) {
      for (; row < end; ++row) {
        if (row + kPrefetchDistance < rows)
          PrefetchRow(problem_.table + Id(row + kPrefetchDistance) * problem_.dim, problem_.dim);
        fn(Id(row), Sum(row, worker), worker);
      }
    });
  }

  // Adds a phase that fills the gradient of every position's weight; it reads the table.
  void AddWeightPhase(Phases& phases, C* weight_gradient) {
    ClearWeightGradient(layout_, plan_, weight_gradient);
    const int64_t rows = layout_.header(plan_)[PlanLayout::kRows];
    phases.AddBlocks(rows, kBlock, [this, weight_gradient](int64_t row, int64_t end, int worker) {
      C* value = value_[static_cast<size_t>(worker)];
      for (; row < end; ++row) {
        const T* stored = problem_.table + Id(row) * problem_.dim;
        for (int64_t i = 0; i < problem_.dim; ++i) value[i] = ToCompute(stored[i]);
        const auto [begin, last] = Positions(row);
        for (int64_t i = begin; i < last; ++i) {
          const int32_t position = layout_.order(plan_)[i];
          weight_gradient[position] =
              kernels_.dot(problem_.dim, value, out_gradient_ + layout_.bag(plan_)[position] * problem_.dim);
        }
      }
    });
  }

  int32_t out_of_range() const { return layout_.header(plan_)[PlanLayout::kOutOfRange]; }
  C* scratch(int worker) const { return value_[static_cast<size_t>(worker)]; }
  const Kernels<C>& kernels() const { return kernels_; }

 private:
  int64_t Id(int64_t row) const {
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(layout_.id_high(plan_)[row])) << 32 |
                                static_cast<uint32_t>(layout_.id_low(plan_)[row]));
  }
  std::pair<int64_t, int64_t> Positions(int64_t row) const {
    const int32_t* row_end = layout_.row_end(plan_);
    return {row == 0 ? 0 : row_end[row - 1], row_end[row]};
  }
  const C* Sum(int64_t row, int worker) const {
    const int32_t* order = layout_.order(plan_);
    const int32_t* bag = layout_.bag(plan_);
    const auto [begin, end] = Positions(row);
    if (end - begin == 1 && problem_.weights == nullptr) return out_gradient_ + bag[order[begin]] * problem_.dim;
    C* sum = sum_[static_cast<size_t>(worker)];
    std::fill_n(sum, problem_.dim, C{0});
    for (int64_t i = begin; i < end; ++i)
      kernels_.axpy(problem_.dim, problem_.weight(order[i]), out_gradient_ + bag[order[i]] * problem_.dim, sum);
    return sum;
  }

  const DenseProblem<T>& problem_;
  const PlanLayout layout_;
  const C* out_gradient_;
  const Kernels<C>& kernels_ = GetKernels<C>();
  Workspace workspace_;
  int32_t* plan_ = nullptr;
  std::vector<C*> sum_, value_;
};

}  // namespace

template <typename T>
Status DenseForward(const DenseProblem<T>& problem, const Pool& pool, typename DenseProblem<T>::C* out) {
  using C = typename DenseProblem<T>::C;
  const Lookups& lookups = problem.lookups;
  Workspace workspace;
  int64_t* row_of = nullptr;
  std::vector<C*> scratch(static_cast<size_t>(pool.workers));
  workspace.Request(&row_of, lookups.size());
  for (C*& buffer : scratch) workspace.Request(&buffer, problem.dim);
  if (Status status = workspace.Allocate(); !status.ok()) return status;
  if (Status status = ResolveIds(problem.num_embeddings, lookups, row_of); !status.ok()) return status;

  Phases phases;
  phases.AddBlocks(lookups.groups * lookups.bags, kPooledBags, [&](int64_t bag, int64_t end, int worker) {
    PoolBags(problem, row_of, bag, end, scratch[static_cast<size_t>(worker)], out);
  });
  pool.Run(phases);
  return {};
}

template <typename T>
Status DenseBackward(const DenseProblem<T>& problem, const Pool& pool, const typename DenseProblem<T>::C* out_gradient,
                     typename DenseProblem<T>::C* gradient, typename DenseProblem<T>::C* weight_gradient) {
  using C = typename DenseProblem<T>::C;
  RowGradients<T> rows(problem, pool, out_gradient);
  if (Status status = rows.Prepare(); !status.ok()) return status;
  Phases phases;
  phases.AddBlocks(problem.num_embeddings, 4096, [&](int64_t begin, int64_t end, int) {
    std::fill_n(gradient + begin * problem.dim, (end - begin) * problem.dim, C{0});
  });
  rows.AddPhase(phases,
                [&](int64_t row, const C* sum, int) { std::copy_n(sum, problem.dim, gradient + row * problem.dim); });
  if (weight_gradient != nullptr) rows.AddWeightPhase(phases, weight_gradient);
  pool.Run(phases);
  return {};
}

template <typename T>
Status DenseUpdate(const DenseProblem<T>& problem, const Pool& pool, const RowTable<T>& table,
                   const typename DenseProblem<T>::C* out_gradient, const OptimizerStep& step,
                   typename DenseProblem<T>::C* weight_gradient, float* applied) {
  using C = typename DenseProblem<T>::C;
  RowGradients<T> rows(problem, pool, out_gradient);
  if (Status status = rows.Prepare(); !status.ok()) return status;
  const bool poisoned = problem.lookups.bounds == Bounds::kPoison && rows.out_of_range() != 0;
  const bool steps = step.allowed && !poisoned;
  std::atomic<bool> finite{true};
  Phases phases;
  if (weight_gradient != nullptr) rows.AddWeightPhase(phases, weight_gradient);
  if (step.skip_nonfinite)
    rows.AddPhase(phases, [&](int64_t, const C* sum, int) {
      if (!AllFinite(sum, problem.dim, static_cast<C>(step.gradient_scale)))
        finite.store(false, std::memory_order_relaxed);
    });
  if (steps)
    rows.AddPhase(phases, [&](int64_t row, const C* sum, int worker) {
      if (finite.load(std::memory_order_relaxed)) table.Update(row, sum, step, rows.kernels(), rows.scratch(worker));
    });
  pool.Run(phases);
  *applied = finite.load() && !poisoned ? 1.0f : 0.0f;
  return {};
}

#define JAX_TT_INSTANTIATE(T, C)                                                                                       \
  template Status DenseForward(const DenseProblem<T>&, const Pool&, C*);                                               \
  template Status DenseBackward(const DenseProblem<T>&, const Pool&, const C*, C*, C*);                                \
  template Status DenseUpdate(const DenseProblem<T>&, const Pool&, const RowTable<T>&, const C*, const OptimizerStep&, \
                              C*, float*)
JAX_TT_INSTANTIATE(float, float);
JAX_TT_INSTANTIATE(double, double);
JAX_TT_INSTANTIATE(bfloat16, float);
JAX_TT_INSTANTIATE(float16, float);

}  // namespace jax_tt
