// Scans of a whole table for its best rows.
#pragma once

#include <stdint.h>

#include "ffi/common/status.h"
#include "ffi/cpu/pool.h"
#include "ffi/cpu/scan/best_rows.h"

namespace jax_tt {

// The rows of a table as floats.
class FloatRows {
 public:
  virtual ~FloatRows() = default;

  // Memory for `workers` threads that read up to `rows` rows at a time.
  virtual void Request(int workers, int64_t rows, Workspace* workspace) = 0;
  // Rows [first, first + count), [count, dim], until the next call with this worker.
  virtual const float* Read(int64_t first, int64_t count, int worker) const = 0;
  // Whether a product at a time takes less time than vectors of queries, of which most lanes would be idle.
  virtual bool ScansByDots(int64_t queries, int64_t dim) const;
  // Offers these products of the rows from block.first_id on, which `block` does not have.
  virtual void ScanDots(ScanBlock block, const BestRows& best, int worker) const;
};

Status ScanRows(const ScanRequest& request, FloatRows* rows, const Pool& pool);

}  // namespace jax_tt
