#include "ffi/cpu/cache/forward.h"

#include <algorithm>

#include "ffi/cpu/dense/pool_bags.h"
#include "ffi/cpu/ids.h"
#include "ffi/cpu/tt/forward.h"
#include "ffi/cpu/tt_plan/plan.h"

namespace jax_tt {
namespace {

// A plan of fewer misses is built by one thread while others pool the hits.
constexpr int64_t kFewMisses = 2048;

// Returns the number of misses.
template <typename C>
int64_t Pack(const Lookups& batch, const C* weights, const PackedMisses<C>& packed) {
  const int64_t words = batch.words_per_id;
  const int32_t* id = static_cast<const int32_t*>(batch.ids);
  int64_t total = 0;
  for (int64_t g = 0; g < batch.groups; ++g) {
    const int32_t* offsets = batch.offsets + g * (batch.bags + 1);
    int32_t* packed_offsets = packed.offsets + g * (batch.bags + 1);
    const int64_t base = g * batch.capacity;
    int32_t count = 0;
    packed_offsets[0] = 0;
    for (int64_t b = 0; b < batch.bags; ++b) {
      // Branch-free: every position is written, and overwritten by the next one unless it is a miss.
      for (int64_t position = base + offsets[b]; position < base + offsets[b + 1]; ++position) {
        int32_t all = -1;
        for (int64_t w = 0; w < words; ++w) all &= packed.ids[(base + count) * words + w] = id[position * words + w];
        if (weights != nullptr) {
          packed.weights[base + count] = weights[position];
          packed.place[position] = count;
        }
        count += all != -1;
      }
      packed_offsets[b + 1] = count;
    }
    std::fill(packed.ids + (base + count) * words, packed.ids + (base + batch.capacity) * words, -1);
    if (weights != nullptr) {
      std::fill(packed.weights + base + count, packed.weights + base + batch.capacity, C{0});
      std::fill(packed.place + base + offsets[batch.bags], packed.place + base + batch.capacity, 0);
    }
    total += count;
  }
  return total;
}

}  // namespace

template <typename T>
Status CacheForward(const PoolHits& pool_hits, const Lookups& batch, const typename TTProblem<T>::C* weights,
                    const TTProblem<T>& problem, const PackedMisses<typename TTProblem<T>::C>& packed, const Pool& pool,
                    int32_t* plan, typename TTProblem<T>::C* out, typename TTProblem<T>::C* saved) {
  Lookups misses = batch;
  misses.ids = packed.ids;
  misses.offsets = packed.offsets;
  if (batch.bounds == Bounds::kWarn) misses.bounds = Bounds::kZero;
  const int64_t bags = batch.groups * batch.bags, pooled = PooledBags(batch);
  int64_t count = 0;
  Status planned;
  Phases phases;
  phases.Add(1 + (bags + pooled - 1) / pooled, [&](int64_t task, int worker) {
    if (task > 0) return pool_hits((task - 1) * pooled, std::min(task * pooled, bags), worker);
    count = Pack(batch, weights, packed);
    if (count < kFewMisses) planned = BuildTTPlan(problem.shape, problem.contraction, misses, Pool{}, plan);
  });
  pool.Run(phases);
  if (count >= kFewMisses) planned = BuildTTPlan(problem.shape, problem.contraction, misses, pool, plan);
  if (!planned.ok()) {
    // Builds the plan of the whole batch for its error message, which must name the position in the caller's batch.
    Status named = BuildTTPlan(problem.shape, problem.contraction, batch, pool, plan);
    return named.ok() ? planned : named;
  }
  const int32_t outside = problem.layout.header(plan)[PlanLayout::kOutOfRange];
  // Reported here and not by the plan, so that positions are those in the caller's batch.
  if (batch.bounds == Bounds::kWarn && outside > 0)
    ReportFirst(batch, &problem.shape, problem.shape.num_embeddings, outside);
  if (count == 0) return {};
  return TTForward(problem, pool, /*add=*/true, out, saved);
}

#define JAX_TT_INSTANTIATE(T, C)                                                                                       \
  template Status CacheForward(const PoolHits&, const Lookups&, const C*, const TTProblem<T>&, const PackedMisses<C>&, \
                               const Pool&, int32_t*, C*, C*)
JAX_TT_INSTANTIATE(float, float);
JAX_TT_INSTANTIATE(double, double);
JAX_TT_INSTANTIATE(bfloat16, float);
JAX_TT_INSTANTIATE(float16, float);

}  // namespace jax_tt
