// Stable radix sorts of positions: the order of a batch, and on the way every order it passes through.
#pragma once

#include <stdint.h>

#include "ffi/cuda/tables/queue.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {

// Bins of one pass: ten bits, and one more for positions that contribute nothing.
constexpr int kMaxBins = 1025;
constexpr int kMaxSortPasses = 16;

// One pass sorts by (words[position] >> shift) & mask, which lies in [0, bins).
struct SortPass {
  const int32_t* words = nullptr;
  int32_t* order = nullptr;  // [n] or null: the positions as they stand after the pass
  int bins = 1;
  int shift = 0;
  int32_t mask = -1;
};

// What the last pass writes beside its order: to[i] = from[position at i].  Of the words of the pass itself nothing is
// read for it.
struct SortedCopy {
  const int32_t* from = nullptr;
  int32_t* to = nullptr;  // null: no copy
};
constexpr int kSortedCopies = 4;

// A sort of positions 0 .. n - 1.
struct StableSort {
  int64_t n = 0;
  int count = 0;
  SortPass pass[kMaxSortPasses];  // the least significant pass first
  SortedCopy copies[kSortedCopies];
  const int32_t* skip = nullptr;  // where it points to anything but 0 nothing is done
  bool alone = false;             // for Run: more of them are sorted by one launch

  // Adds the passes that sort a word of this many bits, as even as they come: fewer bins make a pass cheaper.
  void AddPasses(const int32_t* words, int bits);

  // Whether one block sorts all.
  bool InOneLaunch() const;

  int MaxBins() const;

  // Takes what has to be zero before the sort begins, of which there are `num_zeros` words.
  void PlaceZeros(Workspace& workspace);
  void Place(Workspace& workspace);

  // After PlaceZeros and Place.  Who owns the memory clears it.
  void Enqueue(TableQueue& queue) const;
  // The same of one batch, not beside others.
  Status Run(cudaStream_t stream) const;

  int32_t* zeros = nullptr;
  int64_t num_zeros = 0;

 private:
  // Positions with the words that the next pass sorts by.
  uint64_t* pairs_[2] = {};
};

}  // namespace jax_tt
