#include "ffi/cpu/scan/codes.h"

#include <algorithm>
#include <cmath>

#include "ffi/cpu/kernels/kernels.h"

namespace jax_tt {
namespace {

// Rows of a task, and those that all queries pass before the next ones: whole blocks of the kernels.
constexpr int64_t kRowsOfTask = 16384, kRowsOfBlock = 1024;

// Tables of partial scores of a group of queries, and bounds of them for codes of four bits.
class PartialScores {
 public:
  PartialScores(const ScanRequest& request, const Codebooks& books, const uint8_t* codes, const Pool& pool)
      : request_(request),
        books_(books),
        codes_(codes),
        pool_(pool),
        num_codes_(books.parts * books.terms),
        entries_(int64_t{1} << books.bits),
        best_(request, pool.workers, /*in_order=*/false) {}

  Status Run() {
    const bool bounded = books_.bits == 4;
    Workspace workspace;
    best_.Request(&workspace);
    workspace.Request(&partial_, best_.group() * num_codes_ * entries_);
    workspace.Request(&bounds_, bounded ? best_.group() * num_codes_ * entries_ : 0);
    workspace.Request(&bound_, best_.group());
    workspace.Request(&limit_, pool_.workers * best_.group());
    JAX_TT_RETURN_IF_ERROR(workspace.Allocate());

    const int64_t of_task = std::clamp<int64_t>(request_.num_rows / (16 * pool_.workers), kRowsOfBlock, kRowsOfTask) /
                            kRowsOfBlock * kRowsOfBlock;
    Phases phases;
    for (int64_t first = 0; first < request_.num_queries; first += best_.group()) {
      const int64_t count = std::min(best_.group(), request_.num_queries - first);
      best_.AddStart(&phases, first, count);
      phases.Add(count, [this, first, bounded](int64_t query, int) {
        FindPartial(first, query);
        if (bounded) FindBounds(query);
      });
      phases.AddBlocks(request_.num_rows, of_task, [this, count](int64_t begin, int64_t end, int worker) {
        for (int64_t row = begin; row < end; row += kRowsOfBlock)
          Scan(row, std::min(kRowsOfBlock, end - row), count, worker);
      });
      best_.AddFinish(&phases, first, count);
    }
    pool_.Run(phases);
    return {};
  }

 private:
  float* PartialOf(int64_t query) const { return partial_ + query * num_codes_ * entries_; }

  void FindPartial(int64_t first, int64_t query) const {
    const Kernels<float>& kernels = GetKernels<float>();
    const float* const vector = request_.queries + (first + query) * request_.dim;
    const int64_t of_part = books_.terms * entries_, width = books_.width;
    float* const to = PartialOf(query);
    for (int64_t i = 0; i < books_.parts * of_part; ++i)
      to[i] = kernels.dot(width, vector + i / of_part * width, books_.rows + i * width);
    for (int worker = 0; worker < pool_.workers; ++worker) limit_[worker * best_.group() + query] = 0;
  }

  // Whole numbers that are no less than partial scores, counted in units from the least one of their code.
  void FindBounds(int64_t query) const {
    const float* const partial = PartialOf(query);
    double base = 0, largest = 0, range = 0;
    for (int64_t m = 0; m < num_codes_; ++m) {
      const auto [low, high] = std::minmax_element(partial + m * entries_, partial + (m + 1) * entries_);
      base += *low;
      largest += std::max(std::fabs(*low), std::fabs(*high));
      range = std::max(range, static_cast<double>(*high) - *low);
    }
    // What is not finite makes the base so, and then bounds are not used.
    const bool finite = std::isfinite(base + largest + range);
    const double unit = finite && range > 0 ? range / kMostBound : 1;
    bound_[query] = {finite ? base : NAN, unit, static_cast<double>(num_codes_) * 0x1p-23 * largest};
    uint8_t* to = bounds_ + query * num_codes_ * entries_;
    for (int64_t m = 0; m < num_codes_; ++m) {
      const float low = *std::min_element(partial + m * entries_, partial + (m + 1) * entries_);
      for (int64_t c = 0; c < entries_; ++c) {
        const double steps = std::ceil((static_cast<double>(partial[m * entries_ + c]) - low) / unit);
        *to++ = finite ? static_cast<uint8_t>(std::min<double>(steps, kMostBound)) : 0;
      }
    }
  }

  void Scan(int64_t row, int64_t rows, int64_t queries, int worker) const {
    const ScanCodes codes = {codes_ + row * books_.row_bytes(),
                             rows,
                             books_.row_bytes(),
                             num_codes_,
                             row,
                             queries,
                             partial_,
                             bounds_,
                             bound_,
                             limit_ + worker * best_.group()};
    const ScanKernels& kernels = GetScanKernels();
    (books_.bits == 4 ? kernels.half_bytes : kernels.bytes)(codes, best_.of(worker));
  }

  const ScanRequest request_;
  const Codebooks books_;
  const uint8_t* const codes_;
  const Pool& pool_;
  const int64_t num_codes_, entries_;
  BestRowsOfWorkers best_;
  float* partial_ = nullptr;     // [group, num_codes, entries]
  uint8_t* bounds_ = nullptr;    // the same
  ScoreBound* bound_ = nullptr;  // [group]
  int32_t* limit_ = nullptr;     // [workers, group]
};

}  // namespace

bool ScansByPartialScores(const Codebooks& books, int64_t num_queries) {
  if (books.hot_terms > 0) return false;
  // Bytes select from memory, at a rate that products with the rows of many queries exceed.
  if (books.bits == 8) return num_queries <= 16;
  return books.bits == 4 && books.parts * books.terms <= kMostBoundedCodes;
}

Status ScanByPartialScores(const ScanRequest& request, const Codebooks& books, const uint8_t* codes, const Pool& pool) {
  return PartialScores(request, books, codes, pool).Run();
}

}  // namespace jax_tt
