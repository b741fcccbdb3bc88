// The codes and codebooks of a coded table among the arguments of a handler.
#pragma once

#include "ffi/common/args.h"
#include "ffi/core/coded_rows.h"

namespace jax_tt {

struct CodeArgs {
  const ffi::AnyBuffer& codes;
  const ffi::AnyBuffer& hot_codes;
  const ffi::AnyBuffer& hot_places;
  const ffi::AnyBuffer& codebooks;
};

// The attributes bits, terms and hot_terms, and the arrays, checked.
Status ReadCodebooks(const ffi::Dictionary& attrs, const CodeArgs& args, Codebooks* books);

}  // namespace jax_tt
