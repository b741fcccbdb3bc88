#include "ffi/cpu/scan/best_rows.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace jax_tt {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kMostGroup = 512;
constexpr int64_t kKeysOfGroup = int64_t{4} << 20;

void KeepBest(uint64_t* keys, int64_t k, int64_t count) {
  std::nth_element(keys, keys + (k - 1), keys + count, std::greater<uint64_t>());
}

// A threshold that equal scores are above.  XLA's threads take subnormal numbers for 0, so that none is below 0.
float JustBelow(float score) {
  const float below = std::nextafter(score, kNone);
  return std::fabs(below) < std::numeric_limits<float>::min() ? -std::numeric_limits<float>::min() : below;
}

void Shrink(const BestRows& best, int64_t query) {
  Candidates& of = best.of_query[query];
  KeepBest(of.keys, best.k, of.count);
  of.count = best.k;
  of.least = of.keys[best.k - 1];
  const float last = ScoreOf(of.least);
  best.threshold[query] = best.in_order ? last : JustBelow(last);
}

}  // namespace

BestRowsOfWorkers::BestRowsOfWorkers(const ScanRequest& request, int workers, bool in_order)
    : request_(request), workers_(workers), in_order_(in_order) {
  k_ = std::max<int64_t>(1, std::min(request.k, request.num_rows));
  capacity_ = 2 * k_ + 32;
  const int64_t fit = kKeysOfGroup / (capacity_ * workers);
  group_ = std::max<int64_t>(1, std::min({request.num_queries, kMostGroup, std::max(fit, kMostScanLanes)}));
  stride_ = (group_ + 2 * kMostScanLanes - 1) / kMostScanLanes * kMostScanLanes;
}

void BestRowsOfWorkers::Request(Workspace* workspace) {
  workspace->Request(&keys_, group_ * workers_ * capacity_);
  workspace->Request(&candidates_, workers_ * group_);
  workspace->Request(&threshold_, workers_ * stride_);
  workspace->Request(&excluded_, group_ * request_.num_excluded);
}

BestRows BestRowsOfWorkers::of(int worker) const {
  return {candidates_ + worker * group_,
          threshold_ + worker * stride_,
          request_.present,
          request_.num_rows,
          k_,
          capacity_,
          in_order_,
          Shrink};
}

void BestRowsOfWorkers::AddStart(Phases* phases, int64_t first, int64_t count) {
  phases->AddBlocks(count, 16, [this, first](int64_t begin, int64_t end, int) {
    for (int64_t query = begin; query < end; ++query) Start(first, query);
  });
}

void BestRowsOfWorkers::AddFinish(Phases* phases, int64_t first, int64_t count) {
  phases->AddBlocks(count, 8, [this, first](int64_t begin, int64_t end, int) {
    for (int64_t query = begin; query < end; ++query) Finish(first, query);
  });
}

void BestRowsOfWorkers::Start(int64_t first, int64_t query) {
  const int64_t excludes = request_.num_excluded;
  int32_t* const excluded = excluded_ + query * excludes;
  if (excludes > 0) {
    std::copy_n(request_.exclude + (first + query) * excludes, excludes, excluded);
    std::sort(excluded, excluded + excludes);
  }
  for (int64_t worker = 0; worker < workers_; ++worker) {
    uint64_t* const keys = keys_ + (query * workers_ + worker) * capacity_;
    candidates_[worker * group_ + query] = {keys, excluded, 0, excludes, 0};
    threshold_[worker * stride_ + query] = kNone;
  }
}

void BestRowsOfWorkers::Finish(int64_t first, int64_t query) {
  uint64_t* const keys = keys_ + query * workers_ * capacity_;
  int64_t count = 0;
  for (int64_t worker = 0; worker < workers_; ++worker) {
    const Candidates& of = candidates_[worker * group_ + query];
    std::copy_n(of.keys, of.count, keys + count);
    count += of.count;
  }
  if (count > k_) KeepBest(keys, k_, count);
  count = std::min(count, k_);
  std::sort(keys, keys + count, std::greater<uint64_t>());
  float* const scores = request_.scores + (first + query) * request_.k;
  int32_t* const ids = request_.ids + (first + query) * request_.k;
  for (int64_t i = 0; i < request_.k; ++i) {
    scores[i] = i < count ? ScoreOf(keys[i]) : kNone;
    ids[i] = i < count ? IdOf(keys[i]) : -1;
  }
}

}  // namespace jax_tt
