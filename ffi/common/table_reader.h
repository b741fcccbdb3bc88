// Calls on tables, whose arguments and results follow each other, as the handlers of every platform read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "ffi/common/table_args.h"

namespace jax_tt {

// A call on tables: the arguments of the first, then of the second, and so on; likewise the results.  The steps of all
// tables come before the first: hyper-parameters f32, or f64 for f64 tables, gradient scales [2 * tables] of that type,
// seeds u32 [2 * tables], and the result applied f32 [tables].  Attributes "0", "1" and so on are a dictionary for each
// table; `caller` names what the user called.
//
// Offsets of bags that are parts of those of many features are kept in `offsets` until the call ends; null where the
// host cannot read operands.
using KeptOffsets = std::deque<std::vector<int32_t>>;

struct TablesCall {
  const Args& args;
  const Rets& rets;
  const ffi::Dictionary& attrs;
  size_t results;  // of the tables; a platform may have more after them
  KeptOffsets* offsets = nullptr;
};

using Buffers = std::vector<ffi::AnyBuffer>;

// Reads the tables of a call one after another.
class TableReader {
 public:
  explicit TableReader(const TablesCall& call) : call_(call) {}

  bool done() const { return next_arg_ >= call_.args.size() && next_ret_ >= call_.results; }
  size_t next_arg() const { return next_arg_; }
  size_t next_ret() const { return next_ret_; }
  // The name of the table whose attributes were read last.
  std::string_view table() const { return table_; }

  // The attributes of the next table.
  Status ReadAttrs(std::optional<ffi::Dictionary>* own);
  // The next arguments or results.
  Status ReadArgs(size_t count, Buffers* buffers);
  Status ReadRets(size_t count, Buffers* buffers);
  // The arrays with the rows of the table that has these attributes, of which each array here has one.  With the
  // attributes stack, first_row and rows they are these rows of the arrays of another table, or of those that come next
  // if `stack` is the number of this one.  They are valid as long as the reader is.
  Status ReadRowArgs(const ffi::Dictionary& attrs, size_t count, Buffers* buffers);
  Status ReadRowRets(const ffi::Dictionary& attrs, size_t count, Buffers* buffers);
  // The ids, offsets and weights of the table that has these attributes.  With the attributes flat, first_bag and bags
  // they are those of these bags among the bags of many features, which come with table `flat`.  They are valid as long
  // as the reader is.
  Status ReadBatch(const ffi::Dictionary& attrs, Buffers* buffers);

 private:
  // Arrays by the number of the table that they came with.
  using Stacks = std::map<int64_t, Buffers>;
  using Read = Status (TableReader::*)(size_t count, Buffers* buffers);

  Status ReadRows(const ffi::Dictionary& attrs, size_t count, Read read, Stacks& stacks, Buffers* buffers);
  // Part [first, first + count) of an array along an axis, before which all sizes must be 1.
  Status AppendPart(const ffi::AnyBuffer& array, size_t axis, int64_t first, int64_t count, Buffers* buffers);
  // An array in memory that is not one of XLA's.
  void Append(const ffi::AnyBuffer& like, void* data, std::vector<int64_t> sizes, Buffers* buffers);

  const TablesCall& call_;
  size_t next_arg_ = 0, next_ret_ = 0;
  int next_table_ = 0;
  std::string_view table_;
  Stacks arg_stacks_, ret_stacks_, batches_;
  // What the parts of arrays point to.  Passes, which run when the reader is gone, keep pointers to data alone.
  std::deque<XLA_FFI_Buffer> parts_;
  std::deque<std::vector<int64_t>> sizes_;
};

// Reads the steps of several tables, whose numbers follow each other in one array each.
class StepsReader {
 public:
  // Must be called before the first table: the arrays come before all of theirs.
  Status Start(TableReader* reader);
  // The step of the next table, which has these attributes, and its place in `applied`.
  Status Read(const ffi::Dictionary& attrs, StepArgs* step, float** applied);
  // Must be called after the last table.
  Status Finish() const;

 private:
  StepArgs next_;
  float* applied_ = nullptr;
  int64_t hyper_left_ = 0, tables_left_ = 0, applied_left_ = 0;
};

}  // namespace jax_tt
