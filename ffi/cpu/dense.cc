#include "ffi/cpu/dense.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "ffi/cpu/pool_bags.h"

namespace jax_tt {
namespace {

constexpr int64_t kBlock = 64;

template <typename T>
class ForwardPass : public Pass {
 public:
  using C = typename DenseProblem<T>::C;

  ForwardPass(const DenseProblem<T>& problem, C* out) : problem_(problem), out_(out) {}

  std::string_view table() const override { return problem_.lookups.table; }
  void Request(int workers, Workspace& workspace) override {
    scratch_.resize(static_cast<size_t>(workers));
    workspace.Request(&row_of_, problem_.lookups.size());
    for (C*& buffer : scratch_) workspace.Request(&buffer, problem_.dim);
  }
  Status Plan() override { return ResolveIds(problem_.num_embeddings, problem_.lookups, row_of_); }
  std::vector<TaskSet> Rounds() override {
    const int64_t bags = problem_.lookups.groups * problem_.lookups.bags;
    return {BlockTasks(bags, kPooledBags, [this](int64_t bag, int64_t end, int worker) {
      PoolBags(problem_, row_of_, bag, end, scratch_[static_cast<size_t>(worker)], out_);
    })};
  }

 private:
  const DenseProblem<T> problem_;
  C* const out_;
  int64_t* row_of_ = nullptr;
  std::vector<C*> scratch_;
};

// A pass over the distinct rows of a batch, each with the sum of the gradients of its positions.
template <typename T>
class GradientPass : public Pass {
 public:
  using C = typename DenseProblem<T>::C;

  // weight_gradient: [n], or null.
  GradientPass(const DenseProblem<T>& problem, const C* out_gradient, C* weight_gradient)
      : problem_(problem),
        layout_(MakeDenseLayout(problem.lookups.size())),
        out_gradient_(out_gradient),
        weight_gradient_(weight_gradient) {}

  std::string_view table() const override { return problem_.lookups.table; }
  void Request(int workers, Workspace& workspace) override {
    sum_.resize(static_cast<size_t>(workers));
    value_.resize(static_cast<size_t>(workers));
    workspace.Request(&plan_, layout_.size());
    for (size_t w = 0; w < sum_.size(); ++w) {
      workspace.Request(&sum_[w], problem_.dim);
      workspace.Request(&value_[w], problem_.dim);
    }
  }
  Status Plan() override {
    if (Status status = BuildDensePlan(problem_.num_embeddings, problem_.lookups, plan_); !status.ok()) return status;
    if (weight_gradient_ != nullptr) ClearWeightGradient(layout_, plan_, weight_gradient_);
    return {};
  }

 protected:
  // A round that calls fn(table row, gradient, worker) for every distinct row, and prefetch(table row) some rows ahead.
  template <typename Prefetch, typename Fn>
  TaskSet RowTasks(Prefetch prefetch, Fn fn) {
    return Blocks([this, prefetch, fn](int64_t row, int64_t end, int64_t rows, int worker) {
      for (; row < end; ++row) {
        if (row + kPrefetchDistance < rows) prefetch(Id(row + kPrefetchDistance));
        fn(Id(row), Sum(row, worker), worker);
      }
    });
  }

  // A round that fills the gradient of every position's weight; it reads the table.
  TaskSet WeightTasks() {
    if (weight_gradient_ == nullptr) return {};
    return Blocks([this](int64_t row, int64_t end, int64_t, int worker) {
      C* value = scratch(worker);
      for (; row < end; ++row) {
        const T* stored = problem_.table + Id(row) * problem_.dim;
        for (int64_t i = 0; i < problem_.dim; ++i) value[i] = ToCompute(stored[i]);
        const auto [begin, last] = Positions(row);
        for (int64_t i = begin; i < last; ++i) {
          const int32_t position = layout_.order(plan_)[i];
          weight_gradient_[position] =
              kernels_.dot(problem_.dim, value, out_gradient_ + layout_.bag(plan_)[position] * problem_.dim);
        }
      }
    });
  }

  const DenseProblem<T>& problem() const { return problem_; }
  int32_t out_of_range() const { return layout_.header(plan_)[PlanLayout::kOutOfRange]; }
  C* scratch(int worker) const { return value_[static_cast<size_t>(worker)]; }
  const Kernels<C>& kernels() const { return kernels_; }

 private:
  // fn(begin, end, rows, worker) over blocks of the distinct rows.  There may be as many as positions.
  template <typename Fn>
  TaskSet Blocks(Fn fn) {
    return BlockTasks(layout_.n, kBlock, [this, fn](int64_t row, int64_t end, int worker) {
      const int64_t rows = layout_.header(plan_)[PlanLayout::kRows];
      fn(row, std::min(end, rows), rows, worker);
    });
  }
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

  const DenseProblem<T> problem_;
  const PlanLayout layout_;
  const C* const out_gradient_;
  C* const weight_gradient_;
  const Kernels<C>& kernels_ = GetKernels<C>();
  int32_t* plan_ = nullptr;
  std::vector<C*> sum_, value_;
};

template <typename T>
class BackwardPass : public GradientPass<T> {
 public:
  using C = typename DenseProblem<T>::C;

  BackwardPass(const DenseProblem<T>& problem, const C* out_gradient, C* gradient, C* weight_gradient)
      : GradientPass<T>(problem, out_gradient, weight_gradient), gradient_(gradient) {}

  std::vector<TaskSet> Rounds() override {
    const int64_t dim = this->problem().dim;
    TaskSet clear = BlockTasks(this->problem().num_embeddings, 4096, [this, dim](int64_t begin, int64_t end, int) {
      std::fill_n(gradient_ + begin * dim, (end - begin) * dim, C{0});
    });
    TaskSet write =
        this->RowTasks([this, dim](int64_t row) { PrefetchRow(gradient_ + row * dim, dim); },
                       [this, dim](int64_t row, const C* sum, int) { std::copy_n(sum, dim, gradient_ + row * dim); });
    return {std::move(clear), std::move(write), this->WeightTasks()};
  }

 private:
  C* const gradient_;
};

template <typename T>
class UpdatePass : public GradientPass<T> {
 public:
  using C = typename DenseProblem<T>::C;

  UpdatePass(const DenseProblem<T>& problem, const RowTable<T>& table, const C* out_gradient, const OptimizerStep& step,
             C* weight_gradient, float* applied)
      : GradientPass<T>(problem, out_gradient, weight_gradient), table_(table), step_(step), applied_(applied) {}

  Status Plan() override {
    if (Status status = GradientPass<T>::Plan(); !status.ok()) return status;
    applies_.store(this->problem().lookups.bounds != Bounds::kPoison || this->out_of_range() == 0);
    return {};
  }
  std::vector<TaskSet> Rounds() override {
    TaskSet check, update;
    if (step_.skip_nonfinite)
      check = this->RowTasks([](int64_t) {},
                             [this](int64_t, const C* sum, int) {
                               if (!AllFinite(sum, this->problem().dim, static_cast<C>(step_.gradient_scale)))
                                 applies_.store(false, std::memory_order_relaxed);
                             });
    if (step_.allowed)
      update = this->RowTasks([this](int64_t row) { table_.Prefetch(row, step_.traits()); },
                              [this](int64_t row, const C* sum, int worker) {
                                if (applies_.load(std::memory_order_relaxed))
                                  table_.Update(row, sum, step_, this->kernels(), this->scratch(worker));
                              });
    return {this->WeightTasks(), std::move(check), std::move(update)};
  }
  void Finish() override { *applied_ = applies_.load() ? 1.0f : 0.0f; }

 private:
  const RowTable<T> table_;
  const OptimizerStep step_;
  float* const applied_;
  std::atomic<bool> applies_{true};
};

}  // namespace

template <typename T>
std::unique_ptr<Pass> DenseForward(const DenseProblem<T>& problem, typename DenseProblem<T>::C* out) {
  return std::make_unique<ForwardPass<T>>(problem, out);
}

template <typename T>
std::unique_ptr<Pass> DenseBackward(const DenseProblem<T>& problem, const typename DenseProblem<T>::C* out_gradient,
                                    typename DenseProblem<T>::C* gradient,
                                    typename DenseProblem<T>::C* weight_gradient) {
  return std::make_unique<BackwardPass<T>>(problem, out_gradient, gradient, weight_gradient);
}

template <typename T>
std::unique_ptr<Pass> DenseUpdate(const DenseProblem<T>& problem, const RowTable<T>& table,
                                  const typename DenseProblem<T>::C* out_gradient, const OptimizerStep& step,
                                  typename DenseProblem<T>::C* weight_gradient, float* applied) {
  return std::make_unique<UpdatePass<T>>(problem, table, out_gradient, step, weight_gradient, applied);
}

#define JAX_TT_INSTANTIATE(T, C)                                                                   \
  template std::unique_ptr<Pass> DenseForward(const DenseProblem<T>&, C*);                         \
  template std::unique_ptr<Pass> DenseBackward(const DenseProblem<T>&, const C*, C*, C*);          \
  template std::unique_ptr<Pass> DenseUpdate(const DenseProblem<T>&, const RowTable<T>&, const C*, \
                                             const OptimizerStep&, C*, float*)
JAX_TT_INSTANTIATE(float, float);
JAX_TT_INSTANTIATE(double, double);
JAX_TT_INSTANTIATE(bfloat16, float);
JAX_TT_INSTANTIATE(float16, float);

}  // namespace jax_tt
