// Rows, bags and positions of a batch of lookups in a dense table.
#pragma once

#include <stdint.h>

#include "ffi/cuda/dense/dense.h"
#include "ffi/cuda/tables/batch_rows.h"

namespace jax_tt {

__device__ __forceinline__ int64_t ResolveId(const DenseBatch& batch, int64_t position) {
  return ResolveWholeId(batch.type, batch.ids, position, batch.padded, batch.bounds, batch.num_embeddings);
}

// The positions of a bag.  Offsets out of order are clamped to positions that exist, and told.
struct BagRange {
  int64_t begin, end;
  bool valid;
};

__device__ __forceinline__ BagRange PositionsOf(const DenseBatch& batch, int64_t bag) {
  const uint32_t bags = static_cast<uint32_t>(batch.bags);
  const int64_t group = static_cast<uint32_t>(bag) / bags;
  const int32_t* offsets = batch.offsets + group * (batch.bags + 1);
  const int64_t within = bag - group * batch.bags, base = group * batch.capacity;
  const int64_t first = offsets[0], begin = offsets[within], end = offsets[within + 1];
  const int64_t low = min(max(begin, int64_t{0}), batch.capacity), high = min(max(end, low), batch.capacity);
  return {base + low, base + high, first == 0 && low == begin && high == end};
}

// The bag of a position, or -1 for one that lies in no bag.
__device__ __forceinline__ int32_t BagOf(const DenseBatch& batch, int64_t position) {
  const PlaceInGroup at(batch, position);
  // Where it is if all bags have one size, found by one look instead of a search.
  const float bags_per_id = static_cast<float>(batch.bags) / static_cast<float>(batch.capacity);
  const auto guess = static_cast<int64_t>((static_cast<float>(at.entry) + 0.5f) * bags_per_id);
  int64_t bag = guess;
  bool inside = false;
  if (guess < batch.bags) {
    const int32_t begin = at.offsets[guess], end = at.offsets[guess + 1];  // neither load waits for the other
    inside = at.entry >= begin && at.entry < end;
  }
  if (!inside) bag = FindBag(at.offsets, batch.bags, at.entry);
  return bag < 0 ? -1 : static_cast<int32_t>(at.group * batch.bags + bag);
}

}  // namespace jax_tt
