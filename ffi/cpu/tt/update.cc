#include "ffi/cpu/tt/update.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace jax_tt {
namespace {

int64_t MaxSlice(const TTShape& shape) {
  int64_t size = 0;
  for (int k = 0; k < shape.d; ++k) size = std::max(size, shape.slice_size(k));
  return size;
}

}  // namespace

template <typename T>
Status TTApply(const TTShape& shape, const Pool& pool, const CoreTables<T>& cores,
               const CoreGradients<typename ComputeType<T>::type>& gradients,
               const OptimizerStep<typename ComputeType<T>::type>& step, float* applied) {
  using C = typename ComputeType<T>::type;
  int64_t slices = 0, first[kMaxCores + 1] = {};
  for (int k = 0; k < shape.d; ++k) {
    slices += shape.p[k];
    first[k + 1] = slices;
  }
  Workspace workspace;
  std::vector<C*> scratch(static_cast<size_t>(pool.workers));
  for (C*& buffer : scratch) workspace.Request(&buffer, RowTable<T>::ScratchSize(MaxSlice(shape)));
  if (Status status = workspace.Allocate(); !status.ok()) return status;

  // fn(core, slice, worker) for every touched slice.
  const auto add_phase = [&](Phases& phases, auto fn) {
    phases.AddBlocks(slices, 4, [&, fn](int64_t begin, int64_t end, int worker) {
      int core = 0;
      for (int64_t i = begin; i < end; ++i) {
        while (i >= first[core + 1]) ++core;
        if (gradients.touched[core][i - first[core]]) fn(core, i - first[core], worker);
      }
    });
  };
  const auto gradient = [&](int core, int64_t slice) {
    return gradients.gradient[core] + slice * shape.slice_size(core);
  };
  const RowUpdate<C> update = step.update();
  std::atomic<bool> finite{true};
  Phases phases;
  if (step.skip_nonfinite)
    add_phase(phases, [&](int core, int64_t slice, int) {
      if (!AllFinite(gradient(core, slice), shape.slice_size(core), step.gradient_scale))
        finite.store(false, std::memory_order_relaxed);
    });
  if (step.allowed)
    add_phase(phases, [&](int core, int64_t slice, int worker) {
      if (finite.load(std::memory_order_relaxed))
        cores.table[core].Update(slice, gradient(core, slice), step, update, scratch[static_cast<size_t>(worker)]);
    });
  pool.Run(phases);
  *applied = finite.load() ? 1.0f : 0.0f;
  return {};
}

template <typename T>
Status TTUpdate(const TTProblem<T>& problem, const Pool& pool, const CoreTables<T>& cores,
                const typename TTProblem<T>::C* out_gradient, const typename TTProblem<T>::C* saved,
                const OptimizerStep<typename TTProblem<T>::C>& given, typename TTProblem<T>::C* weight_gradient,
                float* applied) {
  using C = typename TTProblem<T>::C;
  OptimizerStep<C> step = given;
  step.allowed &= !problem.poisoned();
  const RowUpdate<C> update = step.update();
  Workspace workspace;
  CoreGradients<C> gradients;
  if (!step.skip_nonfinite && problem.num_chunks() <= 1) {
    // With one chunk, each slice is updated as soon as its gradient is complete, while this is in the cache.
    std::vector<C*> scratch(static_cast<size_t>(pool.workers));
    for (C*& buffer : scratch) workspace.Request(&buffer, RowTable<T>::ScratchSize(MaxSlice(problem.shape)));
    if (Status status = workspace.Allocate(); !status.ok()) return status;
    gradients.consume = [&](int core, int64_t slice, const C* gradient, int worker) {
      if (!step.allowed) return;
      cores.table[core].Update(slice, gradient, step, update, scratch[static_cast<size_t>(worker)]);
    };
    *applied = problem.poisoned() ? 0.0f : 1.0f;
    return TTBackward(problem, pool, out_gradient, saved, gradients, weight_gradient);
  }
  for (int k = 0; k < problem.shape.d; ++k) {
    workspace.Request(&gradients.gradient[k], problem.shape.core_size(k));
    workspace.Request(&gradients.touched[k], problem.shape.p[k]);
  }
  if (Status status = workspace.Allocate(); !status.ok()) return status;
  if (Status status = TTBackward(problem, pool, out_gradient, saved, gradients, weight_gradient); !status.ok())
    return status;
  if (Status status = TTApply(problem.shape, pool, cores, gradients, step, applied); !status.ok()) return status;
  if (problem.poisoned()) *applied = 0.0f;
  return {};
}

#define JAX_TT_INSTANTIATE(T, C)                                                                       \
  template Status TTApply(const TTShape&, const Pool&, const CoreTables<T>&, const CoreGradients<C>&,  \
                          const OptimizerStep<C>&, float*);                                            \
  template Status TTUpdate(const TTProblem<T>&, const Pool&, const CoreTables<T>&, const C*, const C*, \
                           const OptimizerStep<C>&, C*, float*)
JAX_TT_INSTANTIATE(float, float);
JAX_TT_INSTANTIATE(double, double);
JAX_TT_INSTANTIATE(bfloat16, float);
JAX_TT_INSTANTIATE(float16, float);

}  // namespace jax_tt
