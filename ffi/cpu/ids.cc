#include "ffi/cpu/ids.h"

#include <limits>
#include <string>
#include <type_traits>

#include "ffi/common/reports.h"

namespace jax_tt {
namespace {

std::string TableName(const Lookups& lookups) {
  return lookups.table.empty() ? std::string("the table") : "table '" + std::string(lookups.table) + "'";
}

template <typename Int>
int64_t ReadId(const Int* ids, int64_t position, bool padded) {
  const Int id = ids[position];
  if (padded && id == static_cast<Int>(-1)) return kPadding;
  return id < 0 ? kNegative : static_cast<int64_t>(id);
}

// Digits that are invalid for this shape mean an id past its end, unless the first one is negative.
int64_t ReadDigits(const TTShape& shape, const int32_t* digits) {
  int64_t id = 0;
  bool all_minus_one = true, valid = true;
  for (int k = 0; k < shape.d; ++k) {
    all_minus_one &= digits[k] == -1;
    valid &= digits[k] >= 0 && digits[k] < shape.p[k];
    if (valid) id = id * shape.p[k] + digits[k];
  }
  if (all_minus_one) return kPadding;
  if (digits[0] < 0) return kNegative;
  return valid ? id : shape.num_rows();
}

// With a cache, all bits set mark a hit, and an id that the caller passed with all bits set has only the highest bit.
template <typename Int>
std::string IdText(Int id, bool padded) {
  using Signed = std::make_signed_t<Int>;
  const bool moved = padded && static_cast<Signed>(id) == std::numeric_limits<Signed>::min();
  return "id " + std::to_string(moved ? static_cast<Int>(-1) : id);
}

// The first digit of an id beyond the last row may exceed its factor.  Ids that are too large for this have all digits
// equal to the factors, and negative ids all digits equal to -1.
std::string IdText(const TTShape& shape, const int32_t* digits) {
  if (digits[0] < 0) return "a negative id";
  int64_t id = 0;
  bool known = false;
  for (int k = 0; k < shape.d; ++k) {
    known |= digits[k] != shape.p[k];
    if (__builtin_mul_overflow(id, shape.p[k], &id) || __builtin_add_overflow(id, digits[k], &id)) known = false;
  }
  return known ? "id " + std::to_string(id) : "an id beyond " + std::to_string(shape.num_embeddings);
}

// The id as the caller passed it, for messages.
std::string IdText(const Lookups& lookups, const TTShape* shape, int64_t position) {
  switch (lookups.type) {
    case IdType::kInt32:
      return IdText(static_cast<const int32_t*>(lookups.ids)[position], lookups.padded);
    case IdType::kUint32:
      return IdText(static_cast<const uint32_t*>(lookups.ids)[position], lookups.padded);
    case IdType::kInt64:
      return IdText(static_cast<const int64_t*>(lookups.ids)[position], lookups.padded);
    case IdType::kDigits:
      break;
  }
  return IdText(*shape, static_cast<const int32_t*>(lookups.ids) + position * shape->d);
}

// The first position whose id is out of range.
int64_t FirstOutOfRange(const Lookups& lookups, const TTShape* shape, int64_t num_embeddings) {
  for (int64_t g = 0; g < lookups.groups; ++g) {
    const int64_t base = g * lookups.capacity, end = base + lookups.offsets[g * (lookups.bags + 1) + lookups.bags];
    for (int64_t position = base; position < end; ++position) {
      const int64_t id = ReadId(lookups, shape, position);
      if ((id == kPadding && lookups.padded) || (id >= 0 && id < num_embeddings)) continue;
      return position;
    }
  }
  return 0;
}

}  // namespace

int64_t ReadId(const Lookups& lookups, const TTShape* shape, int64_t position) {
  switch (lookups.type) {
    case IdType::kInt32:
      return ReadId(static_cast<const int32_t*>(lookups.ids), position, lookups.padded);
    case IdType::kUint32:
      return ReadId(static_cast<const uint32_t*>(lookups.ids), position, lookups.padded);
    case IdType::kInt64:
      return ReadId(static_cast<const int64_t*>(lookups.ids), position, lookups.padded);
    case IdType::kDigits:
      return ReadDigits(*shape, static_cast<const int32_t*>(lookups.ids) + position * shape->d);
  }
  return kNegative;
}

Status CheckOffsets(const int32_t* all_offsets, int64_t groups, int64_t bags, int64_t capacity, std::string_view name) {
  for (int64_t g = 0; g < groups; ++g) {
    const int32_t* offsets = all_offsets + g * (bags + 1);
    if (offsets[0] == std::numeric_limits<int32_t>::min())
      return InvalidArgument(std::string(name) + "[0] is " + std::to_string(offsets[0]) +
                             ", expected 0: bags begin so if they were padded, joined or cut while their offsets did "
                             "not fit their ids");
    if (offsets[0] != 0)
      return InvalidArgument(std::string(name) + "[0] is " + std::to_string(offsets[0]) +
                             ", expected 0: ids before the first offset would belong to no bag");
    // Without a branch, so that the compiler uses vector instructions.
    bool falls = false;
    for (int64_t b = 0; b < bags; ++b) falls |= offsets[b] > offsets[b + 1];
    if (!falls && offsets[bags] <= capacity) continue;
    for (int64_t b = 0; b < bags; ++b) {
      if (offsets[b] > offsets[b + 1] || offsets[b + 1] > capacity)
        return InvalidArgument(std::string(name) + "[" + std::to_string(b + 1) + "] is " +
                               std::to_string(offsets[b + 1]) + " after " + std::to_string(offsets[b]) +
                               "; expected offsets that never fall and end at or below the capacity of " +
                               std::to_string(capacity) + " ids");
    }
  }
  return {};
}

Status RefuseId(const Lookups& lookups, const TTShape* shape, int64_t num_embeddings, int64_t position) {
  return OutOfRange(IdText(lookups, shape, position) + " at position " + std::to_string(position) +
                    " is out of range for " + TableName(lookups) + " of " + std::to_string(num_embeddings) +
                    " rows; pass ids in [0, num_embeddings), or bounds=\"warn\", bounds=\"clip\" or bounds=\"zero\"");
}

Status RefuseFirst(const Lookups& lookups, const TTShape* shape, int64_t num_embeddings) {
  return RefuseId(lookups, shape, num_embeddings, FirstOutOfRange(lookups, shape, num_embeddings));
}

void ReportFirst(const Lookups& lookups, const TTShape* shape, int64_t num_embeddings, int64_t count) {
  const int64_t position = FirstOutOfRange(lookups, shape, num_embeddings);
  Post({.table = std::string(lookups.table),
        .num_embeddings = num_embeddings,
        .count = count,
        .id = IdText(lookups, shape, position),
        .position = position});
}

}  // namespace jax_tt
