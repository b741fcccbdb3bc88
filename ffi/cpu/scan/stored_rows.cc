#include "ffi/cpu/scan/stored_rows.h"

namespace jax_tt {

void RowsOfBags::Request(int workers, int64_t rows, Workspace* workspace) {
  BufferedRows::Request(workers, rows, workspace);
  rows_ = rows;
  workspace->Request(&bags_.at, workers * rows);
  workspace->Request(&bags_.out_at, workers * rows);
  workspace->Request(&bags_.end, workers * rows);
}

RowsOfBags::Bags RowsOfBags::BagsOf(int64_t first, int64_t count, int64_t step, int worker) const {
  const Bags bags = {bags_.at + worker * rows_, bags_.out_at + worker * rows_, bags_.end + worker * rows_};
  for (int64_t i = 0; i < count; ++i) {
    bags.at[i] = (first + i) * step;
    bags.out_at[i] = i * dim_;
    bags.end[i] = static_cast<int32_t>(i + 1);
  }
  return bags;
}

void PackedFloats::ReadInto(int64_t first, int64_t count, int worker, float* to) const {
  const Bags bags = BagsOf(first, count, PackedRowBytes(dim_, bits_), worker);
  GetQuantizedKernels().sum_bags(bits_)(dim_, levels_, rows_, bags.at, nullptr, bags.end, count, false, to,
                                        bags.out_at);
}

bool PackedFloats::ScansByDots(int64_t queries, int64_t dim) const {
  // More queries than of floats, since vectors of queries need the rows decoded to memory.
  const int64_t lanes = GetScanKernels().packed_lanes;
  return 4 * queries <= lanes && dim % lanes == 0;
}

void PackedFloats::ScanDots(ScanBlock block, const BestRows& best, int) const {
  const int64_t row_bytes = PackedRowBytes(dim_, bits_);
  const ScanPacked packed = {rows_ + block.first_id * row_bytes, row_bytes, &levels_};
  GetScanKernels().packed_dots(bits_)(packed, block, best);
}

void CodedFloats::Request(int workers, int64_t rows, Workspace* workspace) {
  RowsOfBags::Request(workers, rows, workspace);
  workspace->Request(&unpacked_, workers * books_.unpacked());
}

void CodedFloats::ReadInto(int64_t first, int64_t count, int worker, float* to) const {
  const Bags bags = BagsOf(first, count, 1, worker);
  GetSumCodedBags()(books_, codes_, bags.at, nullptr, bags.end, count, false, to, bags.out_at,
                    unpacked_ + worker * books_.unpacked());
}

}  // namespace jax_tt
