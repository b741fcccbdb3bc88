// The plan of a batch: which lookups name the same row, and which rows share chain products and core slices.
//
// It is made once per batch and read by the forward pass, the backward pass and the fused update.  It is one int32
// buffer whose size is known when the program is traced, so that it can travel between operations as an array.
//
// Positions are sorted by row; rows so that those which share the primary side's innermost slice, and then its whole
// chain of digits, are adjacent.  Rows are cut into chunks of at most `chunk_rows`, and every buffer of the kernels
// is proportional to a chunk, not to the batch.  Within a chunk each side is a forest: the rows are the children of
// the nodes at its deepest level, a node at level k stands for one distinct chain of k digits, and its children at
// level k + 1 extend that chain.
#pragma once

#include <stdint.h>

#include "ffi/core/tt_shape.h"

namespace jax_tt {

// Bytes that the buffers of one chunk may take.
constexpr int64_t kChunkBytes = int64_t{96} << 20;

// Rows in a chunk: as many as fit kChunkBytes, whatever the batch.
int64_t ChunkRows(const TTShape& shape, const Contraction& contraction);

// Nodes of one level of one side.  `slice`, `child_end` are per node, `node_of_child` per child; children are listed
// in `child` and those of node u stand at child[child_end[u - 1] .. child_end[u]).
template <typename Int>
struct LevelView {
  Int* slice;
  Int* child_end;
  Int* child;
  Int* node_of_child;
};

// The layout of the plan buffer for n positions; d levels over both sides.
struct PlanLayout {
  int64_t n = 0;
  int levels = 0;
  int64_t chunk_rows = 1;

  static constexpr int kHeader = 8;
  static constexpr int32_t kPoisoned = -2;
  // The fingerprint is that of the offsets and the ids in bags that the plan was made for.
  enum Header { kValid = 0, kRows = 1, kChunks = 2, kOutOfRange = 3, kPositions = 4, kFingerprint = 5 };

  int64_t max_chunks() const { return n == 0 ? 1 : (n + chunk_rows - 1) / chunk_rows; }
  int64_t chunk_stride() const { return levels + 1; }
  int64_t arrays() const { return 4 + 4 * levels; }
  int64_t size() const { return kHeader + chunk_stride() * max_chunks() + arrays() * n; }

  template <typename Int>
  Int* header(Int* plan) const {
    return plan;
  }
  // chunk(plan, c)[0]: rows up to the end of chunk c; [1 + level]: nodes of that level in chunk c.
  template <typename Int>
  Int* chunk(Int* plan, int64_t c) const {
    return plan + kHeader + c * chunk_stride();
  }
  template <typename Int>
  Int* order(Int* plan) const {  // positions, sorted by row
    return Array(plan, 0);
  }
  template <typename Int>
  Int* row_end(Int* plan) const {  // end in order of the positions of a row
    return Array(plan, 1);
  }
  template <typename Int>
  Int* bag(Int* plan) const {  // bag of a position; -1 when it contributes nothing, kPoisoned when it makes NaN of it
    return Array(plan, 2);
  }
  template <typename Int>
  Int* row_of(Int* plan) const {  // row of a position that contributes; otherwise undefined
    return Array(plan, 3);
  }
  // Level index: the primary side's levels 1 .. depth first, then the secondary side's.
  template <typename Int>
  LevelView<Int> level(Int* plan, int index, int64_t chunk_begin) const {
    Int* base = Array(plan, 4 + 4 * index) + chunk_begin;
    return {base, base + n, base + 2 * n, base + 3 * n};
  }

 private:
  template <typename Int>
  Int* Array(Int* plan, int k) const {
    return plan + kHeader + chunk_stride() * max_chunks() + k * n;
  }
};

inline PlanLayout MakeLayout(const TTShape& shape, const Contraction& contraction, int64_t n) {
  return PlanLayout{n, shape.d, ChunkRows(shape, contraction)};
}

// Bytes of primary products that the forward pass may hand to the backward pass instead of having them recomputed.
constexpr int64_t kSavedBytes = int64_t{48} << 20;

// Elements to keep per position; 0 when recomputing is the better use of memory.
int64_t SavedPerPosition(const TTShape& shape, const Contraction& contraction, int64_t n);

}  // namespace jax_tt
