#include <algorithm>
#include <bit>
#include <optional>

#include "ffi/common/hash_checks.h"
#include "ffi/cuda/cuda_status.h"
#include "ffi/cuda/hash/batch.h"
#include "ffi/cuda/hash/hash.h"
#include "ffi/cuda/hash/lanes.h"
#include "ffi/cuda/lanes.h"
#include "ffi/cuda/sort/sort.h"
#include "ffi/cuda/warp_reduce.h"
#include "ffi/cuda/workspace.h"

namespace jax_tt {
namespace {

// Small blocks, so that an ordinary batch is spread over the whole GPU.
constexpr int kTallyThreads = 128;
constexpr int kThreads = 256;

int64_t Blocks(int64_t threads, int each) { return (threads + each - 1) / each; }

// One thread a position: the distinct keys with their requests.
__global__ void __launch_bounds__(kTallyThreads) TallyKeys(const __grid_constant__ HashInserting batch) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kTallyThreads) + threadIdx.x;
  const int lane = threadIdx.x % 32;
  const bool exists = i < batch.asked.batch.n, here = exists && batch.asked.batch.present[i];
  const unsigned long long key = here ? batch.KeyOf(i) : 0;
  if (exists) batch.slots[i] = static_cast<int32_t>(batch.directory.capacity());
  if (i == 0) batch.words[kHashNothingNew] = 1;

  // Equal keys of a warp are counted as one.
  const unsigned same = __match_any_sync(kAllLanes, key) & __ballot_sync(kAllLanes, here);
  const int leader = here ? __ffs(static_cast<int>(same)) - 1 : lane;
  int32_t first = 0;
  bool made = false;
  if (here && lane == leader) {
    const auto entered = batch.distinct.Enter(static_cast<unsigned>(i) + 1,
                                              FirstHash(static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key)),
                                              [&](unsigned other) { return batch.KeyOf(int64_t{other} - 1) == key; });
    first = static_cast<int32_t>(entered.item - 1);
    made = entered.made;
    atomicAdd(batch.requests + first, static_cast<unsigned>(__popc(same)));
  }
  first = __shfl_sync(kAllLanes, first, leader);
  if (here && batch.asked.policy == HashPolicy::kCustom)
    atomicMax(batch.scores + first, static_cast<unsigned long long>(HashWord(batch.asked.given, i)));

  const int requests = __syncthreads_count(here), unique = __syncthreads_count(made);
  if (threadIdx.x == 0) {
    atomicAdd(batch.words + kHashRequests, requests);
    atomicAdd(batch.words + kHashUnique, unique);
  }
}

// A few lanes a distinct key: known ones get their new score, the others wait for the set that has fewer keys.
__global__ void __launch_bounds__(kThreads) SeekKeys(const __grid_constant__ HashInserting batch) {
  SharedArena arena;
  const Shared<int32_t> sums = arena.Take<int32_t>(2);
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
  __syncthreads();
  const HashDirectory& directory = batch.directory;
  const HashLanes lanes(directory, batch.sets);
  const int64_t i = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / HashLanes::kLanes;
  const unsigned requests = i < batch.asked.batch.n ? batch.requests[i] : 0;
  const uint64_t key = requests > 0 ? batch.KeyOf(i) : 0;
  const int32_t slot = lanes.Find(key, requests > 0);
  const bool is_new = requests > 0 && slot < 0;
  const uint32_t first = batch.FirstSet(key), second = batch.SecondSet(key);
  const bool fewer = lanes.Occupied(second, is_new) < lanes.Occupied(first, is_new);
  if (requests > 0 && lanes.leads()) {
    const HashStamp stamp{batch.asked.policy, static_cast<uint32_t>(*batch.asked.now), *batch.asked.epoch};
    const uint64_t before = is_new ? 0 : directory.WordOf(directory.scores, slot);
    const uint64_t score = HashScore(before, requests, batch.scores[i], stamp);
    if (is_new) {
      batch.scores[i] = score;
      batch.waiting[0].Add(fewer ? second : first, static_cast<int32_t>(i));
      batch.words[kHashNothingNew] = 0;
      atomicAdd(sums, 1);
      atomicAdd(sums + 1, static_cast<int32_t>(requests));
    } else {
      directory.SetWordOf(directory.scores, slot, score);
      directory.touched[slot] = *batch.asked.now;
    }
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    const int32_t sum = sums[threadIdx.x];
    if (sum != 0) atomicAdd(batch.words + kHashNew + threadIdx.x, sum);
  }
}

// One thread an entry of the result.  order: positions by the slots of their keys.
__global__ void __launch_bounds__(kThreads)
    WriteInsertion(const __grid_constant__ HashInserting batch, const int32_t* order,
                   const __grid_constant__ HashInsertion done) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int32_t* const words = batch.words;
  if (i == 0) {
    const int32_t inserted = words[kHashInserted];
    done.counts[kHashRequests] = words[kHashRequests];
    done.counts[kHashHits] = words[kHashRequests] - words[kHashNewRequests];
    done.counts[kHashUnique] = words[kHashUnique];
    done.counts[kHashUniqueHits] = words[kHashUnique] - words[kHashNew];
    done.counts[kHashInserted] = inserted;
    done.counts[kHashEvicted] = words[kHashEvicted];
    done.counts[kHashRefused] = words[kHashNew] - inserted;
  }
  if (i >= batch.asked.batch.n) return;
  const bool inserted = i < words[kHashInserted];
  const int32_t from = inserted ? order[i] : 0;
  done.slots[i] = inserted ? batch.slots[from] : static_cast<int32_t>(batch.directory.capacity());
  SetHashWord(done.keys, i, inserted ? batch.KeyOf(from) : 0);
  if (done.old_keys != nullptr) SetHashWord(done.old_keys, i, inserted ? batch.old_keys[from] : 0);
  if (done.old_scores != nullptr) SetHashWord(done.old_scores, i, inserted ? batch.old_scores[from] : 0);
  if (done.old_touched != nullptr) done.old_touched[i] = inserted ? batch.old_touched[from] : 0;
}

// The sort of all positions by the slots of their keys.
StableSort SortBySlot(const HashInserting& batch, Workspace& workspace) {
  StableSort sort;
  sort.n = batch.asked.batch.n;
  sort.alone = true;
  sort.skip = batch.words + kHashNothingNew;
  sort.AddPasses(batch.slots, std::bit_width(static_cast<uint64_t>(batch.directory.capacity())));
  sort.PlaceZeros(workspace);
  sort.pass[sort.count - 1].order = workspace.Take<int32_t>(sort.n);
  sort.Place(workspace);
  return sort;
}

}  // namespace

int64_t HashInsertWorkspace(const HashDirectory& directory, int64_t n) {
  HashRequests asked;
  asked.batch.n = n;
  HashInserting batch(directory, asked);
  Workspace workspace(nullptr);
  batch.Place(workspace);
  SortBySlot(batch, workspace);
  return workspace.bytes();
}

Status HashInsert(cudaStream_t stream, const HashEntry& entry, void* workspace) {
  const HashDirectory& directory = entry.directory;
  const HashRequests& asked = entry.asked;
  const int64_t n = asked.batch.n;
  HashInserting batch(directory, asked);
  Workspace memory(workspace);
  const int64_t zeros = batch.Place(memory);
  const StableSort by_slot = SortBySlot(batch, memory);
  JAX_TT_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(workspace, 0, static_cast<size_t>(zeros), stream)));
  JAX_TT_RETURN_IF_ERROR(Launch(stream, Blocks(n, kTallyThreads), kTallyThreads, 0, TallyKeys, batch));
  JAX_TT_RETURN_IF_ERROR(
      Launch(stream, Blocks(n * HashLanes::kLanes, kThreads), kThreads, SharedBytes<int32_t>(2), SeekKeys, batch));
  const int rounds = asked.policy == HashPolicy::kNone ? 2 : 4;
  for (int round = 0; round < rounds; ++round)
    JAX_TT_RETURN_IF_ERROR(PlaceHashKeys(stream, batch, round % 2, round >= 2));
  const size_t bytes = static_cast<size_t>(by_slot.num_zeros) * sizeof(int32_t);
  if (bytes > 0) JAX_TT_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(by_slot.zeros, 0, bytes, stream)));
  JAX_TT_RETURN_IF_ERROR(by_slot.Run(stream));
  JAX_TT_RETURN_IF_ERROR(Launch(stream, std::max<int64_t>(Blocks(n, kThreads), 1), kThreads, 0, WriteInsertion, batch,
                                by_slot.pass[by_slot.count - 1].order, entry.done));
  return HashFind(stream, {.directory = directory, .batch = asked.batch, .slots = entry.done.found});
}

int64_t HashWorkspace(std::string_view op, int64_t n, int64_t sets, int64_t ways) {
  std::optional<HashDirectory> directory;
  if (!MakeHashDirectory(sets, ways, {}, &directory).ok()) return 0;  // the handlers refuse it
  return op == "insert" ? HashInsertWorkspace(*directory, n) : op == "double" ? HashDoubleWorkspace(*directory) : 0;
}

}  // namespace jax_tt
