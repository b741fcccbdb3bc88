// How much shared memory a block may have.
#pragma once

#include <cstddef>

#include "ffi/common/status.h"

namespace jax_tt {

// What a kernel may have unasked, on every device.
constexpr size_t kSharedUnasked = size_t{48} << 10;

// The most that any kernel may have on the current device.
Status MostShared(size_t* bytes);

// Lets blocks of this kernel have the most on the current device; the driver is asked the first time only.
//
// The limit belongs to the kernel, not to a launch: were it set to what each launch needs, one host thread could lower
// it between another's setting it and launching.
Status AllowMostShared(const void* kernel);

}  // namespace jax_tt
