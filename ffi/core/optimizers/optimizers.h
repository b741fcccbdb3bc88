// Every fused optimizer of the library.
#pragma once

#include "ffi/core/optimizers/adagrad.h"
#include "ffi/core/optimizers/adagrad_momentum.h"
#include "ffi/core/optimizers/adam.h"
#include "ffi/core/optimizers/counter_rowwise_adagrad.h"
#include "ffi/core/optimizers/cow_clip.h"
#include "ffi/core/optimizers/decayed_adam.h"
#include "ffi/core/optimizers/ftrl.h"
#include "ffi/core/optimizers/global_decay_rowwise_adagrad.h"
#include "ffi/core/optimizers/lamb.h"
#include "ffi/core/optimizers/lars_sgd.h"
#include "ffi/core/optimizers/partial_rowwise_adam.h"
#include "ffi/core/optimizers/partial_rowwise_lamb.h"
#include "ffi/core/optimizers/regularized_rowwise_adagrad.h"
#include "ffi/core/optimizers/rowwise_adagrad.h"
#include "ffi/core/optimizers/rowwise_corrected_adam.h"
#include "ffi/core/optimizers/rowwise_rmsprop.h"
#include "ffi/core/optimizers/rule.h"
#include "ffi/core/optimizers/sgd.h"

namespace jax_tt {

// Python knows them by these names.
// clang-format off
#define JAX_TT_OPTIMIZERS(each) \
  each(Sgd) \
  each(Adagrad) \
  each(RowWiseAdagrad) \
  each(Adam) \
  each(PartialRowWiseAdam) \
  each(Lamb) \
  each(PartialRowWiseLamb) \
  each(LarsSgd) \
  each(RegularizedRowWiseAdagrad) \
  each(DecayedAdam) \
  each(RowWiseCorrectedAdam) \
  each(RowWiseRmsProp) \
  each(Ftrl) \
  each(AdagradMomentum) \
  each(CounterRowWiseAdagrad) \
  each(CowClip) \
  each(GlobalDecayRowWiseAdagrad)
// clang-format on

#define JAX_TT_TRAITS(Rule) TraitsOf<Rule>(),
constexpr OptimizerTraits kOptimizers[] = {JAX_TT_OPTIMIZERS(JAX_TT_TRAITS)};
#undef JAX_TT_TRAITS
#define JAX_TT_NAME(Rule) #Rule,
constexpr const char* kOptimizerNames[] = {JAX_TT_OPTIMIZERS(JAX_TT_NAME)};
#undef JAX_TT_NAME
constexpr int kNumOptimizers = sizeof(kOptimizers) / sizeof(kOptimizers[0]);

}  // namespace jax_tt
