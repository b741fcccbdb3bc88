// The kernel that chooses codes of rows in given codebooks, chosen at run time as those of kernels.h are.
#pragma once

#include <stdint.h>

namespace jax_tt {

// Rows that are searched together, _TOGETHER of jax_tt._kinds.coded.search, and sums that are kept at most while
// further codes are chosen.
constexpr int kSearchRows = 4;
// Rows of codebooks that are transposed together, so that their entries are read in the order of memory.
constexpr int64_t kSearchStride = 16;

// Rows, each of which is to be near the sum of one row of each codebook.
struct CodeSearch {
  const float* rows;  // [n, width]
  int64_t n, width;
  int64_t terms, size;     // codebooks, and rows of each
  const float* codebooks;  // [terms, size, width]
  const float* columns;    // [terms, stride / kSearchStride, width, kSearchStride], the same transposed
  const float* lengths;    // [terms, stride], squared lengths; infinite beyond `size`
  int64_t stride;          // `size` up to a multiple of kSearchStride
  int64_t beam, sweeps;    // as in jax_tt._kinds.coded.search
  int32_t* codes;          // [n, terms]
  float* floats;           // memory of floats_needed()
  int32_t* integers;       // memory of integers_needed()

  int64_t floats_needed() const { return (2 * kSearchRows + 1) * kSearchRows * width; }
  int64_t integers_needed() const { return 2 * kSearchRows * kSearchRows * terms; }
};
using SearchCodes = void (*)(const CodeSearch& search);

SearchCodes GetSearchCodes();

#define JAX_TT_DECLARE_KERNELS(isa)      \
  namespace isa {                        \
  extern const SearchCodes kSearchCodes; \
  }
JAX_TT_DECLARE_KERNELS(baseline)
JAX_TT_DECLARE_KERNELS(x86_64_v3)
JAX_TT_DECLARE_KERNELS(x86_64_v4)
#undef JAX_TT_DECLARE_KERNELS

}  // namespace jax_tt
