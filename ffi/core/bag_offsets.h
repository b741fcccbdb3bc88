// The call that looks at the offsets of bags as a caller gave them, of CPU and GPU.
#pragma once

#include <stdint.h>

#include <string_view>
#include <vector>

namespace jax_tt {

// Of an array of offsets, [examples, size] each: as given, and well-formed.
struct BagOffsets {
  const int32_t* given = nullptr;
  int32_t* offsets = nullptr;
  int64_t size = 0;  // bags + 1
};

struct BagOffsetsCall {
  std::vector<BagOffsets> arrays;
  const int32_t* capacities = nullptr;  // [examples, arrays]
  int32_t* refused = nullptr;           // [examples, arrays], whether the results must be NaN
  int64_t examples = 0;
  // Of malformed offsets, "raise" makes an error, "mark" refuses the batch, "repair" repairs them, and "warn" does so
  // and says it.
  std::string_view mode;
  std::string_view labels;  // of the arrays, in lines
};

}  // namespace jax_tt
