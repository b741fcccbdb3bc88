// The rows of a quantized table among the arguments of a handler.
#pragma once

#include <cstdint>

#include "ffi/common/args.h"
#include "ffi/core/packed_rows.h"

namespace jax_tt {

// The bits of a number of a quantized table, from the attribute bits, which calls on other tables do not have; 0 for
// these.
Status ReadBits(const ffi::Dictionary& attrs, int64_t* bits);

// The rows of a quantized table, their number of columns from the attribute dim, which bytes do not tell, and the
// levels of numbers.  These are in the attribute levels, as whole numbers of PackedLevels::kUnit with spaces between
// them, since calls on many tables have no arrays as attributes of a table; without it, they are uniform.
Status ReadPackedRows(const ffi::Dictionary& attrs, const ffi::AnyBuffer& table, int64_t bits, const void** rows,
                      int64_t* dim, PackedLevels* levels);

}  // namespace jax_tt
