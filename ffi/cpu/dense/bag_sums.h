// Weighted sums of rows, bag by bag.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <type_traits>

#include "ffi/core/coded_rows.h"
#include "ffi/core/half.h"
#include "ffi/core/packed_rows.h"
#include "ffi/cpu/dense/long_sum.h"
#include "ffi/cpu/kernels/coded_kernels.h"
#include "ffi/cpu/kernels/kernels.h"
#include "ffi/cpu/kernels/quantized_kernels.h"
#include "ffi/cpu/prefetch.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {

// Collects the rows of bags and lets a kernel add them up, many at a time.  Rows are added in the order in which they
// come, those of long bags in blocks; a kernel may add the parts of coded rows in another order, which the place of a
// bag among the rows decides. Each worker needs one, on cache lines that no other worker writes.
template <typename T>
class alignas(64) BagSums {
 public:
  using C = typename ComputeType<T>::type;

  void RequestBuffers(int64_t dim, Workspace& workspace) {
    dim_ = dim;
    pitch_ = kPacked > 0 ? PackedRowBytes(dim, kPacked) : dim;
    // Converted rows must stay in the first-level cache.
    capacity_ =
        !kConverts ? kMaxRows : std::clamp<int64_t>(kConvertedElements / std::max<int64_t>(dim, 1), 1, kMaxRows);
    block_ = std::min(capacity_, LongSum<C>::kBlock);
    long_.RequestBuffers(dim, workspace);
    workspace.Request(&at_, capacity_);
    workspace.Request(&weight_, capacity_);
    workspace.Request(&end_, kMaxBags);
    workspace.Request(&out_at_, kMaxBags);
    if (kConverts) workspace.Request(&converted_, capacity_ * dim);
  }

  // Rows of codes, whose numbers the kernel takes, select those of `codebooks`, which must outlive this.
  void Use(const Codebooks& codebooks, Workspace& workspace) {
    codebooks_ = &codebooks;
    pitch_ = 1;
    workspace.Request(&unpacked_, codebooks.unpacked());
  }

  // The numbers of packed rows stand for these levels, which must outlive this.
  void Use(const PackedLevels& levels) { levels_ = &levels; }

  // Rows of `table` will be summed into `out`, with weights or without.
  void Start(const T* table, bool weighted, C* out) {
    table_ = table;
    out_ = out;
    weighted_ = weighted;
    Empty();
  }
  // The sum of the next bag goes to out[out_at ..].
  void StartBag(int64_t out_at) {
    if (bags_ == kMaxBags) Flush();
    out_at_[bags_] = out_at;
  }
  void Add(int64_t row, C weight) {
    if (rows_ == room_) FlushWithinBag();
    at_[rows_] = row * pitch_;
    weight_[rows_++] = weight;
  }
  void EndBag() {
    if (summed_ == LongSum<C>::kFirst) return EndLongBag();
    end_[bags_++] = static_cast<int32_t>(rows_);
    summed_ = 0;
    room_ = capacity_;
  }
  // Must be called after the last bag.
  void Flush() {
    Run(continues_, out_);
    Empty();
  }

 private:
  static constexpr int kPacked = kPackedBits<T>;
  static constexpr bool kCoded = std::is_same_v<T, Coded>;
  // Whether rows are converted before they are added.
  static constexpr bool kConverts = !std::is_same_v<T, C> && kPacked == 0 && !kCoded;
  static constexpr int64_t kMaxRows = 256, kMaxBags = 256, kConvertedElements = 4096, kAhead = 8;

  void Empty() {
    rows_ = bags_ = summed_ = 0;
    room_ = capacity_;
    continues_ = false;
  }
  void FlushWithinBag() {
    if (summed_ == LongSum<C>::kFirst) return AddBlocks();
    const int64_t out_at = out_at_[bags_];
    summed_ += rows_ - (bags_ > 0 ? end_[bags_ - 1] : 0);
    end_[bags_++] = static_cast<int32_t>(rows_);
    Run(continues_, out_);
    out_at_[0] = out_at;
    rows_ = bags_ = 0;
    continues_ = true;
    room_ = std::min(capacity_, LongSum<C>::kFirst - summed_);
    if (room_ > 0) return;
    room_ = capacity_ / block_ * block_;
    long_at_ = out_at;
    long_.Start(out_ + out_at);
  }
  // Of a long bag.
  void AddBlocks() {
    for (int64_t end = 0; end < rows_; ++bags_) {
      end = std::min(end + block_, rows_);
      end_[bags_] = static_cast<int32_t>(end);
      out_at_[bags_] = bags_ * dim_;
    }
    Run(false, long_.blocks());
    long_.Add(bags_);
    rows_ = bags_ = 0;
  }
  void EndLongBag() {
    AddBlocks();
    long_.Finish(out_ + long_at_);
    Empty();
  }
  void Run(bool add, C* out) {
    const C* const weight = weighted_ ? weight_ : nullptr;
    if constexpr (kPacked > 0) {
      packed_(dim_, *levels_, &table_->byte, at_, weight, end_, bags_, add, out, out_at_);
    } else if constexpr (kCoded) {
      coded_(*codebooks_, &table_->byte, at_, weight, end_, bags_, add, out, out_at_, unpacked_);
    } else {
      const C* from = nullptr;
      if constexpr (kConverts)
        from = Convert();
      else
        from = table_;
      kernels_.sum_bags(dim_, from, at_, weight, 0, end_, bags_, add, out, out_at_);
    }
  }
  const C* Convert() {
    for (int64_t k = 0; k < rows_; ++k) {
      if (k + kAhead < rows_) PrefetchLines(table_ + at_[k + kAhead], dim_ * static_cast<int64_t>(sizeof(T)));
      const T* stored = table_ + at_[k];
      C* row = converted_ + k * dim_;
      for (int64_t i = 0; i < dim_; ++i) row[i] = ToCompute(stored[i]);
      at_[k] = k * dim_;
    }
    return converted_;
  }

  const Kernels<C>& kernels_ = GetKernels<C>();
  const SumPackedBags packed_ = GetQuantizedKernels().sum_bags(kPacked);
  const SumCodedBags coded_ = GetSumCodedBags();
  const Codebooks* codebooks_ = nullptr;
  const PackedLevels* levels_ = nullptr;
  const T* table_ = nullptr;
  C* out_ = nullptr;
  LongSum<C> long_;
  int64_t dim_ = 0, pitch_ = 0, capacity_ = 0, rows_ = 0, bags_ = 0;
  int64_t room_ = 0;                 // for rows, before what is there has to be summed
  int64_t summed_ = 0;               // rows of the bag that have been, at most kFirst
  int64_t block_ = 0, long_at_ = 0;  // of a long bag: rows in a block, and where its sum goes
  bool weighted_ = false, continues_ = false;
  int64_t *at_ = nullptr, *out_at_ = nullptr;
  C *weight_ = nullptr, *converted_ = nullptr;
  int32_t* end_ = nullptr;
  uint32_t* unpacked_ = nullptr;
};

}  // namespace jax_tt
