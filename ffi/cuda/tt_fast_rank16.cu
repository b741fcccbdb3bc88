#include "ffi/cuda/tt_fast_launch.h"

namespace jax_tt {

JAX_TT_INSTANTIATE_FAST_RANK(16);

}  // namespace jax_tt
