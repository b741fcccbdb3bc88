#include "ffi/common/packed_table.h"

#include <charconv>
#include <string>
#include <string_view>

namespace jax_tt {
namespace {

Status ReadLevels(const ffi::Dictionary& attrs, int64_t bits, PackedLevels* levels) {
  levels->uniform = !attrs.contains("levels");
  if (bits == 8) return levels->uniform ? Status{} : InvalidArgument("numbers of 8 bits have no levels");
  const int count = 1 << bits;
  for (int k = 0; k < 16; ++k) levels->at[k] = static_cast<float>(k % count);
  if (levels->uniform) return {};
  std::string_view text;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "levels", &text));
  const char *next = text.data(), *const end = next + text.size();
  for (int q = 0; q < count; ++q) {
    if (q > 0 && next != end && *next == ' ') ++next;
    int number = 0;
    const auto [after, error] = std::from_chars(next, end, number);
    if (error != std::errc{} || number < 0 || number >= 16 * PackedLevels::kUnit)
      return InvalidArgument("levels must be " + std::to_string(count) + " whole numbers from 0 to 8191");
    next = after;
    for (int k = q; k < 16; k += count) levels->at[k] = static_cast<float>(number) / PackedLevels::kUnit;
  }
  return next == end ? Status{} : InvalidArgument("levels are more than the numbers of a table");
}

}  // namespace

Status ReadBits(const ffi::Dictionary& attrs, int64_t* bits) {
  *bits = 0;
  if (!attrs.contains("bits")) return {};
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "bits", bits));
  if (*bits != 8 && *bits != 4 && *bits != 3 && *bits != 2)
    return InvalidArgument("quantized tables have 8, 4, 3 or 2 bits a number");
  return {};
}

Status ReadPackedRows(const ffi::Dictionary& attrs, const ffi::AnyBuffer& table, int64_t bits, const void** rows,
                      int64_t* dim, PackedLevels* levels) {
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "dim", dim));
  JAX_TT_RETURN_IF_ERROR(ReadLevels(attrs, bits, levels));
  if (*dim < 1 || *dim > INT32_MAX) return InvalidArgument("dim must be from 1 to 2**31 - 1");
  const ffi::DataType type = table.element_type();
  // The rows of a table that is trained are words, as JAX differentiates only floats.
  if (type != ffi::DataType::U8 && type != ffi::DataType::F32)
    return InvalidArgument("packed rows must be uint8, or words in float32");
  const int64_t unit = type == ffi::DataType::U8 ? 1 : 4;
  *rows = table.untyped_data();
  return CheckCount("a packed row, in bytes,", table.dimensions()[1] * unit,
                    PackedRowBytes(*dim, static_cast<int>(bits)));
}

}  // namespace jax_tt
