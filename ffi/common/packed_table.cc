#include "ffi/common/packed_table.h"

#include "ffi/core/packed_rows.h"

namespace jax_tt {

Status ReadBits(const ffi::Dictionary& attrs, int64_t* bits) {
  *bits = 0;
  if (!attrs.contains("bits")) return {};
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "bits", bits));
  if (*bits != 8 && *bits != 4 && *bits != 3 && *bits != 2)
    return InvalidArgument("quantized tables have 8, 4, 3 or 2 bits a number");
  return {};
}

Status ReadPackedRows(const ffi::Dictionary& attrs, const ffi::AnyBuffer& table, int64_t bits, const void** rows,
                      int64_t* dim) {
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "dim", dim));
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
