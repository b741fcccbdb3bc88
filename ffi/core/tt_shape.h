// The shape of a TT table and the order in which its cores are contracted.  No XLA, no CUDA, no allocation.
#pragma once

#include <stdint.h>

#include "ffi/core/host_device.h"

namespace jax_tt {

constexpr int kMaxCores = 5;

// cores[k]: [p[k], r[k], q[k], r[k + 1]] with r[0] = r[d] = 1.  Row i has digits (i_0 .. i_{d-1}), the last fastest.
struct TTShape {
  int d = 0;
  int64_t p[kMaxCores] = {};
  int64_t q[kMaxCores] = {};
  int64_t r[kMaxCores + 1] = {};
  int64_t num_embeddings = 0;

  JAX_TT_INLINE int64_t dim() const { return Product(q); }
  JAX_TT_INLINE int64_t num_rows() const { return Product(p); }
  JAX_TT_INLINE int64_t slice_size(int k) const { return r[k] * q[k] * r[k + 1]; }
  JAX_TT_INLINE int64_t core_size(int k) const { return p[k] * slice_size(k); }

 private:
  JAX_TT_INLINE int64_t Product(const int64_t* factors) const {
    int64_t n = 1;
    for (int k = 0; k < d; ++k) n *= factors[k];
    return n;
  }
};

// One end of the train, contracted from its outermost core inwards.  Position 1 of the chain is the outermost core.
//
// Seen from the chain, the slice of a core is the matrix [r_in, q, r_out]: as stored on the left side, transposed on
// the right one.  The product of a chain of depth k is the matrix [width(k), rank(k)].
struct Side {
  bool left = true;
  int depth = 0;
  int core[kMaxCores + 1] = {};       // core[k]: the core at position k
  int64_t width[kMaxCores + 1] = {};  // width[k]: product of q over positions 1 .. k; width[0] = 1
  int64_t rank[kMaxCores + 1] = {};   // rank[k]: rank on the inner face of position k; rank[0] = 1

  JAX_TT_INLINE int64_t product_size(int k) const { return width[k] * rank[k]; }
};

// row = primary product times transposed secondary product, rank summed.  The primary side holds the more expensive
// products; unique rows are sorted so that its nodes, and the slices they share, are contiguous.
struct Contraction {
  Side primary;
  Side secondary;
};

// Multiply-adds of the rows of n uniform lookups, counting each distinct chain of digits once.
double ContractionCost(const TTShape& shape, const Contraction& contraction, int64_t n);

// Cheapest contraction for a batch of n lookups.
Contraction ChooseContraction(const TTShape& shape, int64_t n);

// Column of the row for each element of the primary x secondary block; true when it is the identity.
bool ColumnOrder(const TTShape& shape, const Contraction& contraction, int32_t* columns);

}  // namespace jax_tt
