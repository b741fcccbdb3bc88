// The lanes of a warp.
#ifndef JAX_TT_CUDA_LANES_H_
#define JAX_TT_CUDA_LANES_H_

namespace jax_tt {

constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace jax_tt

#endif  // JAX_TT_CUDA_LANES_H_
