// The best rows of a table for each query, from what several threads know.
#pragma once

#include <stdint.h>

#include "ffi/cpu/kernels/scan_kernels.h"
#include "ffi/cpu/parallel.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {

// What is asked of a table, and where the answer goes.
struct ScanRequest {
  const float* queries;    // [num_queries, dim]
  const int32_t* exclude;  // [num_queries, num_excluded], where what is no row counts for nothing
  const bool* present;     // [num_rows], or null: all rows
  int64_t num_queries, num_excluded, num_rows, dim, k;
  float* scores;  // [num_queries, k]
  int32_t* ids;   // [num_queries, k]
};

// Candidates of every worker for a group of queries at a time, so that memory is bounded for any number of them.
class BestRowsOfWorkers {
 public:
  BestRowsOfWorkers(const ScanRequest& request, int workers, bool in_order);

  void Request(Workspace* workspace);

  int64_t group() const { return group_; }  // queries of a group, but for the last one
  // Before and after a scan for queries [first, first + count), of which query 0 of BestRows is the first.
  void AddStart(Phases* phases, int64_t first, int64_t count);
  void AddFinish(Phases* phases, int64_t first, int64_t count);
  BestRows of(int worker) const;

 private:
  void Start(int64_t first, int64_t query);
  void Finish(int64_t first, int64_t query);

  const ScanRequest request_;
  const int workers_;
  const bool in_order_;
  int64_t k_, capacity_, group_, stride_;
  uint64_t* keys_ = nullptr;          // [group, workers, capacity]
  Candidates* candidates_ = nullptr;  // [workers, group]
  float* threshold_ = nullptr;        // [workers, stride]
  int32_t* excluded_ = nullptr;       // [group, num_excluded]
};

}  // namespace jax_tt
