// Reading the ids of a batch, and what is said about those that are out of range.
#pragma once

#include <stdint.h>

#include <string_view>
#include <type_traits>

#include "ffi/common/status.h"
#include "ffi/core/lookups.h"
#include "ffi/core/tt_shape.h"

namespace jax_tt {

// In place of the id of a position: padding, or a negative id.
constexpr int64_t kPadding = -1, kNegative = -2;

// The id of a position, or one of the numbers above.  `shape` is that of digits; null for other ids.
int64_t ReadId(const Lookups& lookups, const TTShape* shape, int64_t position);

// Checks that offsets start at 0, do not decrease and stay within the capacity; errors call them `name`.
Status CheckOffsets(const int32_t* offsets, int64_t groups, int64_t bags, int64_t capacity,
                    std::string_view name = "Bags.offsets");

// The error of Bounds::kError, for the id of a position.
Status RefuseId(const Lookups& lookups, const TTShape* shape, int64_t num_embeddings, int64_t position);

// The same for the first id of the batch that is out of range, of which there must be one.
Status RefuseFirst(const Lookups& lookups, const TTShape* shape, int64_t num_embeddings);

// Makes the report of Bounds::kWarn: that `count` ids are out of range, and which is the first.
void ReportFirst(const Lookups& lookups, const TTShape* shape, int64_t num_embeddings, int64_t count);

// What a position of a dense table reads: a row, or one of these.
enum Unread : int64_t { kNothing = -1, kPoison = -2, kRefused = -3 };

// The rows of a dense table that positions read, for ids of one type.
template <typename Int>
class RowReader {
 public:
  RowReader(const Lookups& lookups, int64_t num_embeddings)
      : ids_(static_cast<const Int*>(lookups.ids)),
        num_embeddings_(static_cast<uint64_t>(num_embeddings)),
        padded_(lookups.padded),
        bounds_(lookups.bounds) {}

  // A row or an Unread; counts ids out of range.
  int64_t operator()(int64_t position, int64_t* out_of_range) const {
    const Int id = ids_[position];
    if (std::is_unsigned_v<Int> && padded_ && id == static_cast<Int>(-1)) return kNothing;
    const int64_t row = static_cast<int64_t>(id);
    return static_cast<uint64_t>(row) < num_embeddings_ ? row : OutOfRange(row, out_of_range);
  }

 private:
  int64_t OutOfRange(int64_t row, int64_t* out_of_range) const {
    if (padded_ && row == -1) return kNothing;
    ++*out_of_range;
    if (bounds_ == Bounds::kError) return kRefused;
    if (bounds_ == Bounds::kPoison) return kPoison;
    // An empty table has no nearest row.
    if (bounds_ == Bounds::kZero || bounds_ == Bounds::kWarn || num_embeddings_ == 0) return kNothing;
    return row < 0 ? 0 : static_cast<int64_t>(num_embeddings_) - 1;
  }

  const Int* ids_;
  uint64_t num_embeddings_;
  bool padded_;
  Bounds bounds_;
};

// fn(reader) with the RowReader of these ids.
template <typename Fn>
auto WithRowReader(const Lookups& lookups, int64_t num_embeddings, Fn&& fn) {
  switch (lookups.type) {
    case IdType::kUint32:
      return fn(RowReader<uint32_t>(lookups, num_embeddings));
    case IdType::kInt64:
      return fn(RowReader<int64_t>(lookups, num_embeddings));
    default:
      return fn(RowReader<int32_t>(lookups, num_embeddings));
  }
}

}  // namespace jax_tt
