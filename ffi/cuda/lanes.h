// The lanes of a warp.
#pragma once

namespace jax_tt {

constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace jax_tt
