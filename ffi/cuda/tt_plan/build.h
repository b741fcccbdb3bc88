// What the two ways of building a plan have in common: their arguments, and how a batch is read.
#pragma once

#include <stdint.h>

#include "ffi/core/lookups.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cuda/lanes.h"
#include "ffi/cuda/simt.h"
#include "ffi/cuda/tables/batch_rows.h"
#include "ffi/cuda/tt_plan/plan.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {

// What the kernels that build a plan are given.
struct BuildArgs {
  TTShape shape;
  CudaPlan layout;
  Lookups lookups;
  const float* sentinel = nullptr;
  int32_t* plan = nullptr;
  const int32_t* skip = nullptr;
  bool hash = false;

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)
  // Whether the plan is there already.
  __device__ bool skips() const { return skip != nullptr && *skip != 0; }
#endif
};

// Cores by the significance of their digits in the order of positions, the least significant first.
void SortOrder(const TTShape& shape, int main, int* cores);

// In one launch, whose blocks each read the whole batch; for batches and shapes of which this holds.
bool BuildsInOneLaunch(const TTShape& shape, const CudaPlan& layout);
void BuildBySlices(TableQueue& queue, const BuildArgs& args, Workspace& workspace);

// In several launches, by passes of a radix sort; for any.
void BuildByPasses(TableQueue& queue, const BuildArgs& args, Workspace& workspace);

#if defined(__CUDACC__) || defined(JAX_TT_EMULATION)

__device__ __forceinline__ uint64_t Mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdu;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53u;
  return x ^ x >> 33;
}

// Adds a hash of the words, each with its place, to *hash: the order of the additions does not matter.
__device__ inline void AddHash(const BlockOfTable& block, const void* memory, int64_t words, uint64_t salt,
                               unsigned long long* hash) {
  const uint32_t* word = static_cast<const uint32_t*>(memory);
  unsigned long long sum = 0;
  for (int64_t i = block.index * blockDim.x + threadIdx.x; i < words; i += block.count * blockDim.x)
    sum += Mix(word[i] + (salt + static_cast<uint64_t>(i)) * 0x9e3779b97f4a7c15u);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(hash, sum);
}

__device__ inline void AddBatchHash(const BlockOfTable& block, const Lookups& lookups, unsigned long long* hash) {
  const int64_t offsets = lookups.groups * (lookups.bags + 1);
  AddHash(block, lookups.offsets, offsets, 0, hash);
  AddHash(block, lookups.ids, lookups.size() * lookups.words_per_id, static_cast<uint64_t>(offsets), hash);
}

// The same as RowsOf, of rows of any kind of id.
template <int kCount>
__device__ __forceinline__ void RowsAt(const BuildArgs& args, int64_t first, int64_t step, int64_t (&rows)[kCount]) {
  const auto join = [&](int64_t i) {
    return JoinDigits(args.shape, static_cast<const int32_t*>(args.lookups.ids) + i * args.shape.d);
  };
  RowsOf(args.lookups, args.layout.n, args.shape.num_embeddings, join, first, step, rows);
}

__device__ __forceinline__ int64_t RowAt(const BuildArgs& args, int64_t position) {
  int64_t row[1];
  RowsAt(args, position, 0, row);
  return row[0];
}

// Writes of a position what does not depend on others: its bag, and that it has no row where it has none.
__device__ inline void WriteBag(const BuildArgs& args, int64_t position, int64_t row) {
  const Lookups& lookups = args.lookups;
  const CudaPlan& layout = args.layout;
  int32_t bag = row == kPoisonedRow ? CudaPlan::kPoisoned : -1;
  if (row >= 0) {
    // With offsets out of order it may be in none; then every result is NaN, but its bag must exist.
    const PlaceInGroup at(lookups, position);
    bag = static_cast<int32_t>(at.group * lookups.bags + max(FindBag(at.offsets, lookups.bags, at.entry), 0));
  } else {
    args.plan[layout.row_of() + position] = -1;
    args.plan[layout.row_head() + position] = -1;
  }
  args.plan[layout.bag() + position] = bag;
  if (row != kNoticedRow) return;
  const int64_t id = lookups.type == IdType::kDigits
                         ? JoinDigits(args.shape, static_cast<const int32_t*>(lookups.ids) + position * args.shape.d)
                         : WrittenWholeId(lookups.type, lookups.ids, position, lookups.padded);
  LeaveNotice(lookups.notice, id, position);
}

#endif

}  // namespace jax_tt
