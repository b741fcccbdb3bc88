#include "ffi/cpu/scan/train.h"

#include <algorithm>

#include "ffi/cpu/kernels/kernels.h"

namespace jax_tt {
namespace {

// Slices of the last core but one whose products are made together, and are the columns of a scan.
constexpr int64_t kColumns = 4 * kMostScanLanes;
// Queries whose columns stay in the second-level cache.
constexpr int64_t kQueries = 8;

// A row of the train is a product of a slice of every core.  The product of a query with the first slices, all but the
// last two, is the same for all rows that begin with their digits (a prefix).  Its products with the slices of the last
// core but one are the columns that the slices of the last core are multiplied by.
class TrainScan {
 public:
  TrainScan(const ScanRequest& request, const TTShape& shape, const float* const* cores, const Pool& pool)
      : request_(request),
        shape_(shape),
        cores_(cores),
        pool_(pool),
        kernels_(GetKernels<float>()),
        joined_(shape.d - 2),
        last_(shape.d - 1),
        depth_(shape.r[last_] * shape.q[last_]),
        height_(shape.r[joined_] * shape.q[joined_]),
        chunks_((shape.p[joined_] + kColumns - 1) / kColumns),
        best_(request, pool.workers, /*in_order=*/false) {}

  Status Run() {
    const int workers = pool_.workers;
    Workspace workspace;
    best_.Request(&workspace);
    workspace.Request(&rows_, shape_.p[last_] * depth_);
    workspace.Request(&joined_slices_, chunks_ * height_ * shape_.r[last_] * kColumns);
    for (int64_t k = 0, rest = shape_.dim(); k <= joined_; rest /= shape_.q[k++])
      product_size_ = std::max(product_size_, shape_.r[k] * rest);
    workspace.Request(&products_, workers * 2 * product_size_);
    workspace.Request(&turned_, workers * kQueries * shape_.q[last_] * height_);
    workspace.Request(&columns_, workers * kQueries * depth_ * kColumns);
    JAX_TT_RETURN_IF_ERROR(workspace.Allocate());

    int64_t prefixes = 1;
    for (int k = 0; k < joined_; ++k) prefixes *= shape_.p[k];
    const int64_t of_prefix = shape_.p[joined_] * shape_.p[last_];
    prefixes = std::min(prefixes, (request_.num_rows + of_prefix - 1) / of_prefix);
    Phases phases;
    phases.AddBlocks(shape_.p[last_], 64, [this](int64_t begin, int64_t end, int) { TurnLast(begin, end); });
    phases.Add(chunks_ * height_, [this](int64_t task, int) { TurnJoined(task / height_, task % height_); });
    for (int64_t first = 0; first < request_.num_queries; first += best_.group()) {
      const int64_t count = std::min(best_.group(), request_.num_queries - first);
      best_.AddStart(&phases, first, count);
      // All prefixes with the same slices follow each other, so that these stay in the cache.
      phases.Add(chunks_ * prefixes, [this, first, count, prefixes](int64_t task, int worker) {
        for (int64_t query = 0; query < count; query += kQueries)
          Scan(task % prefixes, task / prefixes, first, query, std::min(kQueries, count - query), worker);
      });
      best_.AddFinish(&phases, first, count);
    }
    pool_.Run(phases);
    return {};
  }

 private:
  // Rows of the scan: slices [r, q] of the last core as [q, r].
  void TurnLast(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kernels_.transpose(shape_.r[last_], shape_.q[last_], cores_[last_] + i * depth_, rows_ + i * depth_);
  }

  // Row t of the slices of a chunk, [height, r, kColumns], with zeros beyond the last slice.
  void TurnJoined(int64_t chunk, int64_t t) {
    const int64_t rank = shape_.r[last_], slice = height_ * rank;
    const int64_t first = chunk * kColumns, count = std::min(kColumns, shape_.p[joined_] - first);
    const float* const from = cores_[joined_] + first * slice + t * rank;
    float* const to = joined_slices_ + (chunk * height_ + t) * rank * kColumns;
    for (int64_t s = 0; s < rank; ++s)
      for (int64_t i = 0; i < kColumns; ++i) to[s * kColumns + i] = i < count ? from[i * slice + s] : 0.0f;
  }

  // The product of a query with the slices of a prefix, [height, q of the last core].
  const float* PrefixProduct(const float* query, int64_t prefix, int worker) const {
    int64_t below = 1;  // prefixes with the same first digits
    for (int k = 0; k < joined_; ++k) below *= shape_.p[k];
    float* to = products_ + worker * 2 * product_size_;
    float* other = to + product_size_;
    int64_t rest = shape_.dim();
    for (int k = 0; k < joined_; ++k) {
      below /= shape_.p[k];
      rest /= shape_.q[k];
      const int64_t height = shape_.r[k] * shape_.q[k], rank = shape_.r[k + 1];
      const float* const slice = cores_[k] + prefix / below % shape_.p[k] * height * rank;
      kernels_.gemm_tn(height, rest, rank, slice, rank, query, rest, to, rest, false);
      query = to;
      std::swap(to, other);
    }
    return query;
  }

  void Scan(int64_t prefix, int64_t chunk, int64_t first, int64_t query, int64_t count, int worker) const {
    const int64_t rank = shape_.r[last_], width = shape_.q[last_], wide = rank * kColumns;
    float* const turned = turned_ + worker * kQueries * width * height_;
    float* const columns = columns_ + worker * kQueries * depth_ * kColumns;
    for (int64_t j = 0; j < count; ++j) {
      const float* const vector = request_.queries + (first + query + j) * request_.dim;
      kernels_.transpose(height_, width, PrefixProduct(vector, prefix, worker), turned + j * width * height_);
    }
    kernels_.gemm_nn(count * width, wide, height_, turned, height_, joined_slices_ + chunk * height_ * wide, wide,
                     columns, wide, false);
    const int64_t slice = chunk * kColumns;
    ScanBlock block = {rows_,
                       shape_.p[last_],
                       depth_,
                       nullptr,
                       std::min(kColumns, shape_.p[joined_] - slice),
                       kColumns,
                       (prefix * shape_.p[joined_] + slice) * shape_.p[last_],
                       shape_.p[last_],
                       0,
                       0};
    for (int64_t j = 0; j < count; ++j) {
      block.columns = columns + j * depth_ * kColumns;
      block.query = query + j;
      GetScanKernels().products(block, best_.of(worker));
    }
  }

  const ScanRequest request_;
  const TTShape shape_;
  const float* const* const cores_;
  const Pool& pool_;
  const Kernels<float>& kernels_;
  const int joined_, last_;
  const int64_t depth_;   // numbers of a slice of the last core
  const int64_t height_;  // rows of a slice of the core before it
  const int64_t chunks_;
  BestRowsOfWorkers best_;
  int64_t product_size_ = 0;
  float* rows_ = nullptr;           // [p, q, r] of the last core
  float* joined_slices_ = nullptr;  // [chunks, height, r, kColumns] of the core before it
  float* products_ = nullptr;       // [workers, 2, product_size]
  float* turned_ = nullptr;         // [workers, kQueries, q, height]
  float* columns_ = nullptr;        // [workers, kQueries, depth, kColumns]
};

}  // namespace

Status ScanTrain(const ScanRequest& request, const TTShape& shape, const float* const* cores, const Pool& pool) {
  return TrainScan(request, shape, cores, pool).Run();
}

}  // namespace jax_tt
