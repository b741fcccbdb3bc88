// Scans of tensor trains, whose rows are never computed.
#pragma once

#include "ffi/common/status.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cpu/pool.h"
#include "ffi/cpu/scan/best_rows.h"

namespace jax_tt {

// The best rows of the train of these cores, core k [p[k], r[k], q[k], r[k + 1]].
Status ScanTrain(const ScanRequest& request, const TTShape& shape, const float* const* cores, const Pool& pool);

}  // namespace jax_tt
