#include "ffi/common/table_reader.h"

#include <algorithm>
#include <string>
#include <utility>

namespace jax_tt {

Status TableReader::ReadAttrs(std::optional<ffi::Dictionary>* own) {
  auto found = call_.attrs.get<ffi::Dictionary>(std::to_string(next_table_));
  if (!found.has_value()) return InvalidArgument("a table has no attributes");
  *own = *found;
  ++next_table_;
  table_ = {};
  // Hash tables have no name here.
  return (*own)->contains("table") ? ReadAttr(**own, "table", &table_) : Status{};
}

Status TableReader::ReadArgs(size_t count, Buffers* buffers) {
  for (buffers->clear(); buffers->size() < count; ++next_arg_) {
    auto buffer = call_.args.get<ffi::AnyBuffer>(next_arg_);
    if (!buffer.has_value()) return InvalidArgument("an argument of a table is missing");
    buffers->push_back(*buffer);
  }
  return {};
}

Status TableReader::ReadRets(size_t count, Buffers* buffers) {
  for (buffers->clear(); buffers->size() < count; ++next_ret_) {
    if (next_ret_ >= call_.results) return InvalidArgument("a result of a table is missing");
    auto buffer = call_.rets.get<ffi::AnyBuffer>(next_ret_);
    if (!buffer.has_value()) return InvalidArgument("a result of a table is missing");
    buffers->push_back(**buffer);
  }
  return {};
}

Status TableReader::ReadRowArgs(const ffi::Dictionary& attrs, size_t count, Buffers* buffers) {
  return ReadRows(attrs, count, &TableReader::ReadArgs, arg_stacks_, buffers);
}

Status TableReader::ReadRowRets(const ffi::Dictionary& attrs, size_t count, Buffers* buffers) {
  return ReadRows(attrs, count, &TableReader::ReadRets, ret_stacks_, buffers);
}

Status TableReader::ReadRows(const ffi::Dictionary& attrs, size_t count, Read read, Stacks& stacks, Buffers* buffers) {
  if (!attrs.contains("stack")) return (this->*read)(count, buffers);
  int64_t stack = 0, first = 0, rows = 0;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "stack", &stack));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "first_row", &first));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "rows", &rows));
  if (stack == next_table_ - 1) JAX_TT_RETURN_IF_ERROR((this->*read)(count, &stacks[stack]));
  const auto found = stacks.find(stack);
  if (found == stacks.end() || found->second.size() != count)
    return InvalidArgument("a table has rows in a stack that no table before it has");
  buffers->clear();
  for (const ffi::AnyBuffer& array : found->second) JAX_TT_RETURN_IF_ERROR(AppendPart(array, 0, first, rows, buffers));
  return {};
}

Status TableReader::ReadBatch(const ffi::Dictionary& attrs, Buffers* buffers) {
  if (!attrs.contains("flat")) return ReadArgs(3, buffers);
  if (call_.offsets == nullptr) return InvalidArgument("this platform takes no parts of the bags of many features");
  int64_t flat = 0, first = 0, bags = 0;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "flat", &flat));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "first_bag", &first));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "bags", &bags));
  if (flat == next_table_ - 1) JAX_TT_RETURN_IF_ERROR(ReadArgs(3, &batches_[flat]));
  const auto found = batches_.find(flat);
  if (found == batches_.end()) return InvalidArgument("a table has bags that no table before it has");
  const ffi::AnyBuffer &ids = found->second[0], &offsets = found->second[1], &weights = found->second[2];
  const int32_t* ends = nullptr;
  JAX_TT_RETURN_IF_ERROR(Data(offsets, "offsets", -1, &ends));
  if (first < 0 || bags < 0 || bags >= Count(offsets) - first)
    return InvalidArgument("a table has bags that the batch does not have");
  const auto capacity = ids.dimensions().size() < 2 ? 0 : ids.dimensions()[1];
  ends += first;
  for (int64_t bag = 0; bag <= bags; ++bag)
    if (ends[bag] < (bag == 0 ? 0 : ends[bag - 1]) || ends[bag] > capacity)
      return InvalidArgument("KeyedBags.offsets[" + std::to_string(first + bag) + "] is " + std::to_string(ends[bag]) +
                             "; expected offsets that never fall and end at or below the capacity of " +
                             std::to_string(capacity) + " ids");
  std::vector<int32_t>& own = call_.offsets->emplace_back(static_cast<size_t>(bags) + 1);
  for (int64_t bag = 0; bag <= bags; ++bag) own[static_cast<size_t>(bag)] = ends[bag] - ends[0];
  const int64_t count = ends[bags] - ends[0];
  buffers->clear();
  JAX_TT_RETURN_IF_ERROR(AppendPart(ids, 1, ends[0], count, buffers));
  Append(offsets, own.data(), {1, 1, bags + 1}, buffers);
  // Without weights, the array of them is empty.
  const bool weighted = Count(weights) > 0;
  return AppendPart(weights, 1, weighted ? ends[0] : 0, weighted ? count : 0, buffers);
}

Status TableReader::AppendPart(const ffi::AnyBuffer& array, size_t axis, int64_t first, int64_t count,
                               Buffers* buffers) {
  const auto sizes = array.dimensions();
  bool leading = true;
  for (size_t k = 0; k < std::min(axis, sizes.size()); ++k) leading &= sizes[k] == 1;
  if (!leading || sizes.size() <= axis || first < 0 || count < 0 || first > sizes[axis] - count)
    return InvalidArgument("a table has a part of an array that the array does not have");
  std::vector<int64_t> own(sizes.begin(), sizes.end());
  own[axis] = count;
  const int64_t each = sizes[axis] == 0 ? 0 : static_cast<int64_t>(array.size_bytes()) / sizes[axis];
  Append(array, static_cast<char*>(array.untyped_data()) + first * each, std::move(own), buffers);
  return {};
}

void TableReader::Append(const ffi::AnyBuffer& like, void* data, std::vector<int64_t> sizes, Buffers* buffers) {
  sizes_.push_back(std::move(sizes));
  parts_.push_back({.struct_size = XLA_FFI_Buffer_STRUCT_SIZE,
                    .extension_start = nullptr,
                    .dtype = static_cast<XLA_FFI_DataType>(like.element_type()),
                    .data = data,
                    .rank = static_cast<int64_t>(sizes_.back().size()),
                    .dims = sizes_.back().data()});
  buffers->emplace_back(&parts_.back());
}

Status StepsReader::Start(TableReader* reader) {
  Buffers args, applied;
  JAX_TT_RETURN_IF_ERROR(reader->ReadArgs(3, &args));
  JAX_TT_RETURN_IF_ERROR(reader->ReadRets(1, &applied));
  hyper_left_ = Count(args[0]);
  tables_left_ = Count(args[1]) / 2;
  JAX_TT_RETURN_IF_ERROR(ReadNumbers(args[0], args[1], &next_));
  JAX_TT_RETURN_IF_ERROR(CheckCount("gradient scales", Count(args[1]), 2 * tables_left_));
  JAX_TT_RETURN_IF_ERROR(Data(args[2], "seeds", 2 * tables_left_, &next_.seed));
  applied_left_ = Count(applied[0]);
  return Data(applied[0], "applied", applied_left_, &applied_);
}

Status StepsReader::Read(const ffi::Dictionary& attrs, StepArgs* step, float** applied) {
  JAX_TT_RETURN_IF_ERROR(ReadUpdateAttrs(attrs, &next_));
  const int64_t hypers = next_.traits().hyperparameters;
  if (hypers > hyper_left_ || tables_left_ == 0) return InvalidArgument("hyper-parameters of a table are missing");
  if (applied_left_ == 0) return InvalidArgument("applied is shorter than the number of tables");
  *step = next_;
  *applied = applied_++;
  const auto size = static_cast<int64_t>(ffi::ByteWidth(next_.type));
  next_.hyper = static_cast<const char*>(next_.hyper) + hypers * size;
  next_.scale = static_cast<const char*>(next_.scale) + 2 * size;
  next_.seed += 2;
  hyper_left_ -= hypers;
  --tables_left_;
  --applied_left_;
  return {};
}

Status StepsReader::Finish() const {
  if (hyper_left_ == 0 && tables_left_ == 0 && applied_left_ == 0) return {};
  return InvalidArgument("there are hyper-parameters, scales or results of more tables than the call has");
}

}  // namespace jax_tt
