#include "ffi/cpu/tt/forward.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "ffi/cpu/dense/long_sum.h"
#include "ffi/cpu/tt/pair.h"
#include "ffi/cpu/tt/passes.h"

namespace jax_tt {
namespace {

// JoinOf: Join or PairJoin.
template <typename T, template <typename> typename JoinOf>
class Forward {
 public:
  using C = typename TTProblem<T>::C;

  Forward(const TTProblem<T>& problem, const Pool& pool, bool add, C* out, C* saved)
      : problem_(problem),
        pool_(pool),
        add_(add),
        out_(out),
        saved_(saved),
        join_(problem, pool.workers),
        sums_(pool.workers) {}

  Status Run() {
    const int64_t max_rows = std::min(problem_.layout.chunk_rows, problem_.num_rows());
    join_.RequestBuffers(max_rows, workspace_);
    workspace_.Request(&rows_, max_rows * problem_.shape.dim());
    for (LongSum<C>& sum : sums_) sum.RequestBuffers(problem_.shape.dim(), workspace_);
    if (Status status = workspace_.Allocate(); !status.ok()) return status;
    // A batch without rows has no chunk, but its bags must still be cleared.
    const int64_t chunks = std::max<int64_t>(problem_.num_chunks(), 1);
    for (int64_t c = 0, begin = 0; c < chunks; ++c) {
      const int64_t end = problem_.num_rows() == 0 ? 0 : problem_.layout.chunk(problem_.plan, c)[0];
      Phases phases;
      if (end > begin) join_.AddRowPhases(c, begin, saved_, rows_, phases);
      AddPoolPhase(begin, end, phases);
      pool_.Run(phases);
      begin = end;
    }
    return {};
  }

 private:
  // Adds the rows of this chunk, [begin, end), to their bags; the first chunk clears them unless `add` is set.
  void AddPoolPhase(int64_t begin, int64_t end, Phases& phases) {
    const int64_t dim = problem_.shape.dim(), num_bags = problem_.groups * problem_.bags;
    phases.AddBlocks(num_bags, 16, [=, this](int64_t bag_begin, int64_t bag_end, int worker) {
      LongSum<C>& sum = sums_[static_cast<size_t>(worker)];
      const int32_t* bag_of = problem_.layout.bag(problem_.plan);
      const int32_t* row_of = problem_.layout.row_of(problem_.plan);
      for (int64_t bag = bag_begin; bag < bag_end; ++bag) {
        const int64_t block = bag / problem_.bags, within = bag % problem_.bags;
        const int32_t* offsets = problem_.offsets + block * (problem_.bags + 1) + within;
        C* out = out_ + bag * dim;
        bool poisoned = false;
        if (begin == 0 && !add_) std::fill_n(out, dim, C{0});
        sum.Open(out);
        for (int64_t position = block * problem_.capacity + offsets[0];
             position < block * problem_.capacity + offsets[1]; ++position) {
          poisoned |= bag_of[position] == PlanLayout::kPoisoned;
          if (bag_of[position] < 0 || row_of[position] < begin || row_of[position] >= end) continue;
          join_.kernels().axpy(dim, problem_.weight(position), rows_ + (row_of[position] - begin) * dim, sum.Next());
        }
        sum.Close();
        if (poisoned) std::fill_n(out, dim, std::numeric_limits<C>::quiet_NaN());
      }
    });
  }

  const TTProblem<T>& problem_;
  const Pool& pool_;
  const bool add_;
  C* out_;
  C* saved_;
  Workspace workspace_;
  JoinOf<T> join_;
  C* rows_ = nullptr;
  std::vector<LongSum<C>> sums_;
};

}  // namespace

template <typename T>
Status TTForward(const TTProblem<T>& problem, const Pool& pool, bool add, typename TTProblem<T>::C* out,
                 typename TTProblem<T>::C* saved) {
  if (problem.shape.d == 2) return Forward<T, PairJoin>(problem, pool, add, out, saved).Run();
  return Forward<T, Join>(problem, pool, add, out, saved).Run();
}

template Status TTForward(const TTProblem<float>&, const Pool&, bool, float*, float*);
template Status TTForward(const TTProblem<double>&, const Pool&, bool, double*, double*);
template Status TTForward(const TTProblem<bfloat16>&, const Pool&, bool, float*, float*);
template Status TTForward(const TTProblem<float16>&, const Pool&, bool, float*, float*);

}  // namespace jax_tt
