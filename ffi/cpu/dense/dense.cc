#include "ffi/cpu/dense/dense.h"

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>
#include <vector>

#include "ffi/cpu/dense/bag_sums.h"
#include "ffi/cpu/dense/long_sum.h"
#include "ffi/cpu/dense/pool_bags.h"
#include "ffi/cpu/dense/rows.h"
#include "ffi/cpu/ids.h"

namespace jax_tt {
namespace {

template <typename T>
class ForwardPass : public Pass {
 public:
  using C = typename DenseProblem<T>::C;

  ForwardPass(const DenseProblem<T>& problem, C* out) : problem_(problem), out_(out) {}

  std::string_view table() const override { return problem_.lookups.table; }
  void Request(int workers, Workspace& workspace) override {
    sums_.resize(static_cast<size_t>(workers));
    for (BagSums<T>& sums : sums_) {
      sums.RequestBuffers(problem_.dim, workspace);
      if constexpr (std::is_same_v<T, Coded>) sums.Use(problem_.codebooks, workspace);
      if constexpr (kPackedBits<T> > 0) sums.Use(problem_.levels);
    }
  }
  Status Plan() override {
    const Lookups& lookups = problem_.lookups;
    return CheckOffsets(lookups.offsets, lookups.groups, lookups.bags, lookups.capacity);
  }
  std::vector<TaskSet> Rounds() override {
    const Lookups& lookups = problem_.lookups;
    return WithRowReader(lookups, problem_.num_embeddings, [&](auto reader) -> std::vector<TaskSet> {
      return {BlockTasks(lookups.groups * lookups.bags, PooledBags(lookups),
                         [this, reader](int64_t bag, int64_t end, int worker) {
                           int64_t out_of_range = 0;
                           PoolBags(
                               problem_, [&](int64_t position) { return reader(position, &out_of_range); }, bag, end,
                               sums_[static_cast<size_t>(worker)], out_);
                           if (out_of_range > 0) out_of_range_.fetch_add(out_of_range, std::memory_order_relaxed);
                         })};
    });
  }
  Status Finish() override {
    const Lookups& lookups = problem_.lookups;
    const int64_t out_of_range = out_of_range_.load();
    if (out_of_range > 0 && lookups.bounds == Bounds::kError)
      return RefuseFirst(lookups, nullptr, problem_.num_embeddings);
    if (out_of_range > 0 && lookups.bounds == Bounds::kWarn)
      ReportFirst(lookups, nullptr, problem_.num_embeddings, out_of_range);
    return {};
  }

 private:
  const DenseProblem<T> problem_;
  C* const out_;
  std::vector<BagSums<T>> sums_;
  std::atomic<int64_t> out_of_range_{0};
};

// A pass over the distinct rows of a batch, each with the sum of the gradients of its positions.
template <typename T>
class GradientPass : public Pass {
 public:
  using C = typename DenseProblem<T>::C;

  // weight_gradient: [n], or null.
  GradientPass(const DenseProblem<T>& problem, const C* out_gradient, C* weight_gradient)
      : problem_(problem), out_gradient_(out_gradient), weight_gradient_(weight_gradient) {}

  std::string_view table() const override { return problem_.lookups.table; }
  void Request(int workers, Workspace& workspace) override {
    rows_.RequestBuffers(problem_.lookups.size(), problem_.num_embeddings, problem_.weights != nullptr,
                         weight_gradient_ != nullptr, workspace);
    sums_.resize(static_cast<size_t>(workers));
    value_.resize(static_cast<size_t>(workers));
    long_.resize(static_cast<size_t>(workers));
    for (size_t w = 0; w < sums_.size(); ++w) {
      long_[w].RequestBuffers(problem_.dim, workspace);
      workspace.Request(&sums_[w], BlockRows() * problem_.dim);
      workspace.Request(&value_[w], RowTable<T>::ScratchSize(problem_.dim));
    }
  }
  Status Plan() override { return rows_.Build(problem_, weight_gradient_); }

 protected:
  // A round that calls fn(table row, gradient, worker) for every distinct row, and before that prefetch(table row).
  template <typename Prefetch, typename Fn>
  TaskSet RowTasks(Prefetch prefetch, Fn fn) {
    return Blocks([this, prefetch, fn](int64_t row, int64_t end, int worker) {
      for (int64_t u = row; u < end; ++u) prefetch(rows_.row(u));
      C* sums = sums_[static_cast<size_t>(worker)];
      Sum(row, end, worker, sums);
      for (int64_t u = row; u < end; ++u) fn(rows_.row(u), sums + (u - row) * problem_.dim, worker);
    });
  }

  // A round that fills the gradient of every position's weight; it reads the table.
  TaskSet WeightTasks() {
    if (weight_gradient_ == nullptr) return {};
    return Blocks([this](int64_t row, int64_t end, int worker) {
      C* value = scratch(worker);
      for (; row < end; ++row) {
        const T* stored = problem_.table + rows_.row(row) * problem_.dim;
        for (int64_t i = 0; i < problem_.dim; ++i) value[i] = ToCompute(stored[i]);
        for (int64_t i = rows_.begin(row); i < rows_.end()[row]; ++i)
          weight_gradient_[rows_.position()[i]] = kernels_.dot(problem_.dim, value, out_gradient_ + rows_.at()[i]);
      }
    });
  }

  const DenseProblem<T>& problem() const { return problem_; }
  int64_t out_of_range() const { return rows_.out_of_range(); }
  C* scratch(int worker) const { return value_[static_cast<size_t>(worker)]; }

 private:
  // sums[end - row, dim]: of the gradients of these rows.
  void Sum(int64_t row, int64_t end, int worker, C* sums) {
    for (int64_t u = row; u < end; ++u) {
      const int64_t first = u;
      while (u < end && rows_.end()[u] - rows_.begin(u) <= LongSum<C>::kFirst) ++u;
      SumEntries(rows_.begin(first), rows_.end() + first, u - first, sums + (first - row) * problem_.dim);
      if (u < end) SumLongRow(u, long_[static_cast<size_t>(worker)], sums + (u - row) * problem_.dim);
    }
  }
  void SumLongRow(int64_t row, LongSum<C>& sum, C* out) {
    constexpr int64_t kBlock = LongSum<C>::kBlock;
    const int64_t last = rows_.end()[row];
    auto at = static_cast<int32_t>(rows_.begin(row) + LongSum<C>::kFirst);
    SumEntries(rows_.begin(row), &at, 1, out);
    sum.Start(out);
    while (at < last) {
      const int64_t begin = at;
      int32_t end[LongSum<C>::kBlocks];
      int64_t blocks = 0;
      while (blocks < LongSum<C>::kBlocks && at < last)
        end[blocks++] = at = static_cast<int32_t>(std::min<int64_t>(at + kBlock, last));
      SumEntries(begin, end, blocks, sum.blocks());
      sum.Add(blocks);
    }
    sum.Finish(out);
  }
  // sums[count, dim]: over the entries from `begin` to the first end, from there to the next one, and so on.
  void SumEntries(int64_t begin, const int32_t* end, int64_t count, C* sums) const {
    kernels_.sum_bags(problem_.dim, out_gradient_, rows_.at(), rows_.weight(), begin, end, count, false, sums, nullptr);
  }
  // Rows per task, whose sums stay in the first-level cache.
  int64_t BlockRows() const { return std::clamp<int64_t>(4096 / std::max<int64_t>(problem_.dim, 1), 1, 64); }
  // fn(begin, end, worker) over blocks of the distinct rows.  There may be as many as positions.
  template <typename Fn>
  TaskSet Blocks(Fn fn) {
    return BlockTasks(problem_.lookups.size(), BlockRows(), [this, fn](int64_t row, int64_t end, int worker) {
      if (row < rows_.count()) fn(row, std::min(end, rows_.count()), worker);
    });
  }

  const DenseProblem<T> problem_;
  const C* const out_gradient_;
  C* const weight_gradient_;
  const Kernels<C>& kernels_ = GetKernels<C>();
  DenseRows<C> rows_;
  std::vector<C*> sums_, value_;
  std::vector<LongSum<C>> long_;
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
        this->RowTasks([this, dim](int64_t row) { PrefetchLines(gradient_ + row * dim, dim * sizeof(C)); },
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

  UpdatePass(const DenseProblem<T>& problem, const RowTable<T>& table, const C* out_gradient,
             const OptimizerStep<C>& step, C* weight_gradient, float* applied)
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
                               if (!AllFinite(sum, this->problem().dim, step_.gradient_scale))
                                 applies_.store(false, std::memory_order_relaxed);
                             });
    if (step_.allowed)
      update = this->RowTasks([this](int64_t row) { table_.Prefetch(row, step_.traits); },
                              [this](int64_t row, const C* sum, int worker) {
                                if (applies_.load(std::memory_order_relaxed))
                                  table_.Update(row, sum, step_, update_, this->scratch(worker));
                              });
    return {this->WeightTasks(), std::move(check), std::move(update)};
  }
  Status Finish() override {
    *applied_ = applies_.load() ? 1.0f : 0.0f;
    return {};
  }

 private:
  const RowTable<T> table_;
  const OptimizerStep<C> step_;
  const RowUpdate<C> update_ = step_.update();
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
                                  const typename DenseProblem<T>::C* out_gradient,
                                  const OptimizerStep<typename DenseProblem<T>::C>& step,
                                  typename DenseProblem<T>::C* weight_gradient, float* applied) {
  return std::make_unique<UpdatePass<T>>(problem, table, out_gradient, step, weight_gradient, applied);
}

#define JAX_TT_INSTANTIATE(T, C)                                                                   \
  template std::unique_ptr<Pass> DenseForward(const DenseProblem<T>&, C*);                         \
  template std::unique_ptr<Pass> DenseBackward(const DenseProblem<T>&, const C*, C*, C*);          \
  template std::unique_ptr<Pass> DenseUpdate(const DenseProblem<T>&, const RowTable<T>&, const C*, \
                                             const OptimizerStep<C>&, C*, float*)
JAX_TT_INSTANTIATE(float, float);
JAX_TT_INSTANTIATE(double, double);
JAX_TT_INSTANTIATE(bfloat16, float);
JAX_TT_INSTANTIATE(float16, float);

template std::unique_ptr<Pass> DenseForward(const DenseProblem<Packed<8>>&, float*);
template std::unique_ptr<Pass> DenseForward(const DenseProblem<Packed<4>>&, float*);
template std::unique_ptr<Pass> DenseForward(const DenseProblem<Packed<3>>&, float*);
template std::unique_ptr<Pass> DenseForward(const DenseProblem<Packed<2>>&, float*);
template std::unique_ptr<Pass> DenseForward(const DenseProblem<Coded>&, float*);

}  // namespace jax_tt
