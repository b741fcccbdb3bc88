// Scans of coded tables by the partial scores of each query, without rows.
#pragma once

#include "ffi/common/status.h"
#include "ffi/core/coded_rows.h"
#include "ffi/cpu/pool.h"
#include "ffi/cpu/scan/best_rows.h"

namespace jax_tt {

// Whether partial scores take less time than products with the rows.
bool ScansByPartialScores(const Codebooks& books, int64_t num_queries);

Status ScanByPartialScores(const ScanRequest& request, const Codebooks& books, const uint8_t* codes, const Pool& pool);

}  // namespace jax_tt
