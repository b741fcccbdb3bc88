#include "ffi/cpu/args.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <utility>

#include "ffi/core/sentinel.h"
#include "ffi/cpu/devices.h"

namespace jax_tt {

namespace {

// The shortest decimal representation that identifies this float.
std::string Digits(float value) {
  char digits[32];
  return std::string(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
}

}  // namespace

Status CheckSentinel(const ffi::AnyBuffer& sentinel, std::string_view table) {
  const float* value = nullptr;
  JAX_TT_RETURN_IF_ERROR(Data(sentinel, "sentinel", 1, &value));
  if (SentinelHolds(*value)) return {};
  const std::string name = table.empty() ? std::string("a fused table") : "fused table '" + std::string(table) + "'";
  if (*value == 0.0f)
    return InvalidArgument(
        name +
        " was overwritten with zeros (its sentinel is 0, expected 1): the last loss did not use the table, so "
        "the gradient of the table was zeros instead of its next value. Restore the table from a checkpoint, and step "
        "the model with jax_tt.FusedOptimizer, or in linen jax_tt.linen.TrainState: both keep a table that a loss "
        "does not use");
  return InvalidArgument(
      name + " was changed by something other than its own update (its sentinel is " + Digits(*value) +
      ", expected 1). The gradient of a fused table is its next value, so it must reach the table as it is: not added "
      "(two uses in one loss, gradient accumulation), averaged (pmean), clipped, scaled or stepped by an optimizer. "
      "Look up all features of a shared table in one call, update with FusedOptimizer, use grad_scale= for loss "
      "scaling, or drop optimizer= to train the table with optax");
}

Pool MakePool(OpThreads threads) {
  Pool pool;
  pool.workers = std::max(1, NumWorkers(threads.pool.num_threads()) / BusyDevices(threads.device));
  pool.schedule = [thread_pool = threads.pool](std::function<void()> closure) mutable {
    thread_pool.Schedule(std::move(closure));
  };
  return pool;
}

}  // namespace jax_tt
