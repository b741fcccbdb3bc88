#include "ffi/cpu/scan/scan.h"

#include <algorithm>

namespace jax_tt {
namespace {

// Queries [count, dim] as columns [dim, stride].
void AddColumns(const ScanRequest& request, int64_t first, int64_t count, int64_t stride, float* columns,
                Phases* phases) {
  phases->AddBlocks(request.dim, 64, [=](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t j = 0; j < stride; ++j)
        columns[t * stride + j] = j < count ? request.queries[(first + j) * request.dim + t] : 0.0f;
  });
}

}  // namespace

bool FloatRows::ScansByDots(int64_t queries, int64_t dim) const {
  const int64_t lanes = GetScanKernels().lanes;
  return 8 * queries <= lanes && dim % lanes == 0;
}

void FloatRows::ScanDots(ScanBlock block, const BestRows& best, int worker) const {
  block.rows = Read(block.first_id, block.num_rows, worker);
  GetScanKernels().dots(block, best);
}

Status ScanRows(const ScanRequest& request, FloatRows* rows, const Pool& pool) {
  const ScanKernels& kernels = GetScanKernels();
  const int64_t dim = request.dim;
  // Rows that stay in the second-level cache while all columns pass them, in whole tiles of rows.
  const int64_t block = std::clamp<int64_t>((int64_t{48} << 10) / (dim * 4) / 48, 1, 16) * 48;
  const int64_t blocks = (request.num_rows + block - 1) / block;
  const int64_t of_task = std::clamp<int64_t>(blocks / (16 * pool.workers), 1, 16) * block;

  BestRowsOfWorkers best(request, pool.workers, true);
  const int64_t padding = kMostScanLanes * 4;  // tiles are whole
  const int64_t stride = (best.group() + padding - 1) / padding * padding;
  Workspace workspace;
  float* columns;
  best.Request(&workspace);
  rows->Request(pool.workers, block, &workspace);
  workspace.Request(&columns, dim * stride);
  JAX_TT_RETURN_IF_ERROR(workspace.Allocate());

  Phases phases;
  for (int64_t first = 0; first < request.num_queries; first += best.group()) {
    const int64_t count = std::min(best.group(), request.num_queries - first);
    const bool by_dots = rows->ScansByDots(count, dim);
    best.AddStart(&phases, first, count);
    if (!by_dots) AddColumns(request, first, count, stride, columns, &phases);
    const float* const with = by_dots ? request.queries + first * dim : columns;
    phases.AddBlocks(request.num_rows, of_task, [&, count, by_dots, with](int64_t begin, int64_t end, int worker) {
      const BestRows found = best.of(worker);
      for (int64_t row = begin; row < end; row += block) {
        ScanBlock one = {nullptr, std::min(block, end - row), dim, with, count, stride, row, 0, 0, 1};
        if (by_dots) {
          rows->ScanDots(one, found, worker);
          continue;
        }
        one.rows = rows->Read(row, one.num_rows, worker);
        kernels.products(one, found);
      }
    });
    best.AddFinish(&phases, first, count);
  }
  pool.Run(phases);
  return {};
}

}  // namespace jax_tt
