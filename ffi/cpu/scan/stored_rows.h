// Rows of tables as floats, from what each kind of table stores.
#pragma once

#include <stdint.h>

#include "ffi/core/coded_rows.h"
#include "ffi/core/packed_rows.h"
#include "ffi/cpu/kernels/coded_kernels.h"
#include "ffi/cpu/kernels/quantized_kernels.h"
#include "ffi/cpu/scan/scan.h"

namespace jax_tt {

// Rows that are floats already.
class StoredFloats final : public FloatRows {
 public:
  StoredFloats(const float* rows, int64_t dim) : rows_(rows), dim_(dim) {}

  void Request(int, int64_t, Workspace*) override {}
  const float* Read(int64_t first, int64_t, int) const override { return rows_ + first * dim_; }

 private:
  const float* const rows_;
  const int64_t dim_;
};

// Rows that are read into a buffer of each worker.
class BufferedRows : public FloatRows {
 public:
  explicit BufferedRows(int64_t dim) : dim_(dim) {}

  void Request(int workers, int64_t rows, Workspace* workspace) override {
    of_worker_ = rows * dim_;
    workspace->Request(&buffer_, workers * of_worker_);
  }
  const float* Read(int64_t first, int64_t count, int worker) const override {
    float* const to = buffer_ + worker * of_worker_;
    ReadInto(first, count, worker, to);
    return to;
  }

 protected:
  virtual void ReadInto(int64_t first, int64_t count, int worker, float* to) const = 0;

  const int64_t dim_;

 private:
  int64_t of_worker_ = 0;
  float* buffer_ = nullptr;
};

// Rows of bfloat16 or float16.
template <typename T>
class HalfRows final : public BufferedRows {
 public:
  using Widen = void (*)(int64_t n, const T* from, float* to);

  HalfRows(const T* rows, int64_t dim, Widen widen) : BufferedRows(dim), rows_(rows), widen_(widen) {}

 private:
  void ReadInto(int64_t first, int64_t count, int, float* to) const override {
    widen_(count * dim_, rows_ + first * dim_, to);
  }

  const T* const rows_;
  const Widen widen_;
};

// Rows that a kernel for sums of bags reads: bags of one row each.
class RowsOfBags : public BufferedRows {
 public:
  using BufferedRows::BufferedRows;

  void Request(int workers, int64_t rows, Workspace* workspace) override;

 protected:
  struct Bags {
    int64_t *at, *out_at;
    int32_t* end;
  };
  // Bags of rows first, first + 1, ..., of which each takes `step` of what the rows are counted in.
  Bags BagsOf(int64_t first, int64_t count, int64_t step, int worker) const;

 private:
  int64_t rows_ = 0;
  Bags bags_ = {};  // of all workers
};

// Rows of a quantized table.
class PackedFloats final : public RowsOfBags {
 public:
  PackedFloats(const uint8_t* rows, int64_t dim, int bits, const PackedLevels& levels)
      : RowsOfBags(dim), rows_(rows), bits_(bits), levels_(levels) {}

  bool ScansByDots(int64_t queries, int64_t dim) const override;
  void ScanDots(ScanBlock block, const BestRows& best, int worker) const override;

 private:
  void ReadInto(int64_t first, int64_t count, int worker, float* to) const override;

  const uint8_t* const rows_;
  const int bits_;
  const PackedLevels levels_;
};

// Rows of a coded table.
class CodedFloats final : public RowsOfBags {
 public:
  CodedFloats(const Codebooks& books, const uint8_t* codes) : RowsOfBags(books.dim()), books_(books), codes_(codes) {}

  void Request(int workers, int64_t rows, Workspace* workspace) override;

 private:
  void ReadInto(int64_t first, int64_t count, int worker, float* to) const override;

  const Codebooks books_;
  const uint8_t* const codes_;
  uint32_t* unpacked_ = nullptr;
};

}  // namespace jax_tt
