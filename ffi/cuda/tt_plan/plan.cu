#include <algorithm>

#include "ffi/cuda/tt_plan/build.h"
#include "ffi/cuda/tt_plan/plan.h"

namespace jax_tt {
namespace {

constexpr int kThreads = 256;

// What making a plan again takes.
struct Rebuilt {
  unsigned long long* hash;
  int32_t *is_given, *plan;

  Rebuilt(const CudaPlan& layout, Workspace& workspace)
      : hash(workspace.Take<unsigned long long>(1)),
        is_given(workspace.Take<int32_t>(1)),
        plan(workspace.Take<int32_t>(layout.size())) {}
};

// What the kernels are given that tell whether a plan is this batch's.
struct CompareArgs {
  Lookups lookups;
  const int32_t* plan;
  int64_t n;
  unsigned long long* hash;
  int32_t* is_given;
};

template <typename Tables>
__global__ void __launch_bounds__(kThreads) HashBatch(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const CompareArgs& args = tables.Find(&block);
  AddBatchHash(block, args.lookups, args.hash);
}

template <typename Tables>
__global__ void __launch_bounds__(32) ComparePlan(const __grid_constant__ Tables tables) {
  BlockOfTable block;
  const CompareArgs& args = tables.Find(&block);
  if (threadIdx.x != 0) return;
  *args.is_given = args.plan[CudaPlan::kPositions] == args.n &&
                   *reinterpret_cast<const unsigned long long*>(args.plan + CudaPlan::kHash) == *args.hash;
}

constexpr TableKernel kHashBatch =
    TableKernelOf<CompareArgs, HashBatch<OneTable<CompareArgs>>, HashBatch<ManyTables<CompareArgs>>, kThreads>::kKernel;
constexpr TableKernel kComparePlan =
    TableKernelOf<CompareArgs, ComparePlan<OneTable<CompareArgs>>, ComparePlan<ManyTables<CompareArgs>>, 32>::kKernel;
void Build(TableQueue& queue, const BuildArgs& args, Workspace& workspace) {
  if (BuildsInOneLaunch(args.shape, args.layout))
    BuildBySlices(queue, args, workspace);
  else
    BuildByPasses(queue, args, workspace);
}

// What building takes beside the plan.
void TakeMemory(const TTShape& shape, const CudaPlan& layout, Workspace& workspace) {
  TableQueue unused;
  BuildArgs args;
  args.shape = shape;
  args.layout = layout;
  Build(unused, args, workspace);
}

}  // namespace

// Which side of the main pivot is contracted with it first decides which rows should be adjacent.
void SortOrder(const TTShape& shape, int main, int* cores) {
  const bool left_first = MakePivot(shape, main).left_first;
  int count = 0;
  for (int side = 0; side < 2; ++side)
    for (int k = 0; k < shape.d; ++k)
      if (k != main && (k < main) == (left_first == (side == 1))) cores[count++] = k;
  cores[count] = main;
}

CudaPlan LayOutPlan(const TTShape& shape, int64_t n, const FastTileSize& tile) {
  // Parts are few enough for the gradients of their slices to stay small, and large enough to share a slice.
  constexpr int64_t kPartBytes = int64_t{64} << 20, kMinParts = 128, kMaxParts = 2048;
  // A small batch is cut finer, so that its parts spread evenly over the multiprocessors.
  constexpr int64_t kSmallBatch = 16384;
  const int64_t least_rows = n <= kSmallBatch ? 32 : 64;
  int64_t most_parts[kMaxCores] = {};
  CudaPlan layout;
  layout.d = shape.d;
  layout.main = MainPivot(shape);
  layout.n = n;
  std::copy_n(shape.p, shape.d, layout.p);
  // Of the other cores every entry has a short share, which one block adds up quickly.
  constexpr int64_t kListPart = 512;
  for (int k = 0; k < shape.d; ++k) layout.part_rows[k] = layout.least_rows[k] = kListPart;
  const PivotList pivots = BackwardPivots(shape);
  for (int i = 0; i < pivots.count; ++i) {
    const int k = pivots.core[i];
    const int64_t bytes = shape.slice_size(k) * static_cast<int64_t>(sizeof(float));
    most_parts[k] = std::clamp(kPartBytes / bytes, kMinParts, kMaxParts);
    layout.part_rows[k] = layout.least_rows[k] = std::max(least_rows, (n + most_parts[k] - 1) / most_parts[k]);
  }
  const int main = layout.main;
  layout.tile_rows = layout.tile_prefixes = layout.part_rows[main];
  if (tile.rows > 0) {
    // A part of more than one tile where that many parts would have too many shares.
    const int64_t least = std::min(tile.rows, tile.prefixes), most = most_parts[main];
    layout.part_tiles = std::max<int64_t>(n <= kSmallBatch ? 1 : 2, ((n + most - 1) / most + least - 1) / least);
    layout.tile_rows = tile.rows;
    layout.tile_prefixes = tile.prefixes;
    layout.part_rows[main] = layout.part_tiles * tile.rows;
    // Passes of a sort leave tiles aside.
    layout.least_rows[main] = BuildsInOneLaunch(shape, layout) ? layout.part_tiles * least : layout.part_rows[main];
  }
  for (int k = 0; k < shape.d; ++k) layout.max_parts[k] = n / layout.least_rows[k] + std::min(shape.p[k], n);
  return layout;
}

int64_t PlanWorkspace(const TTShape& shape, const CudaPlan& layout) {
  Workspace workspace(nullptr);
  TakeMemory(shape, layout, workspace);
  return workspace.bytes();
}

void BuildPlan(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
               const float* sentinel, bool hash, int32_t* plan, void* memory) {
  Workspace workspace(memory);
  Build(queue, {shape, layout, lookups, sentinel, plan, nullptr, hash}, workspace);
}

int64_t EnsurePlanWorkspace(const TTShape& shape, const CudaPlan& layout) {
  Workspace workspace(nullptr);
  Rebuilt(layout, workspace);
  TakeMemory(shape, layout, workspace);
  return workspace.bytes();
}

PlanRef EnsurePlan(TableQueue& queue, const TTShape& shape, const CudaPlan& layout, const Lookups& lookups,
                   const int32_t* given, void* memory) {
  Workspace workspace(memory);
  const Rebuilt rebuilt(layout, workspace);
  queue.Clear(rebuilt.hash, sizeof(uint64_t) / sizeof(int32_t));
  const int64_t words = std::max<int64_t>(lookups.size() * lookups.words_per_id, lookups.groups * (lookups.bags + 1));
  const int64_t blocks = std::clamp<int64_t>((words + kThreads - 1) / kThreads, 1, 1024);
  const CompareArgs compare{lookups, given, layout.n, rebuilt.hash, rebuilt.is_given};
  queue.Add(kHashBatch, blocks, 0, compare);
  queue.Add(kComparePlan, 1, 0, compare);
  Build(queue, {shape, layout, lookups, nullptr, rebuilt.plan, rebuilt.is_given, /*hash=*/false}, workspace);
  return {given, rebuilt.plan, rebuilt.is_given};
}

}  // namespace jax_tt
