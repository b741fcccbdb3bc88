#include "ffi/cpu/tt_plan/plan.h"

#include <algorithm>
#include <vector>

#include "ffi/core/divider.h"
#include "ffi/cpu/ids.h"
#include "ffi/cpu/sort/group_by.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {
namespace {

// The contributing positions and their ids, and the sort keys of rows.
struct Scratch {
  int32_t* positions = nullptr;
  int64_t* ids = nullptr;
  uint64_t *keys = nullptr, *row_keys = nullptr, *sorting = nullptr;
  int64_t count = 0;

  void RequestBuffers(int64_t n, Workspace& workspace) {
    workspace.Request(&positions, n);
    workspace.Request(&ids, n);
    workspace.Request(&keys, n);
    workspace.Request(&row_keys, n);
    workspace.Request(&sorting, Grouper::BufferSize(n));
  }
};

// Memory to group one side; the two sides are grouped concurrently.
struct SideScratch {
  uint64_t *keys = nullptr, *node_keys = nullptr, *sorting = nullptr;
};

constexpr int64_t kNone = -1;

// Fills positions and ids, bag (-1 for positions that contribute nothing) and the counters.  Returns the position of an
// id that is an error with Bounds::kError, or kNone.
int64_t CollectIds(const Lookups& lookups, const TTShape& shape, int32_t* bag, Scratch& scratch, int32_t* header) {
  const int64_t num_embeddings = shape.num_embeddings;
  int64_t out_of_range = 0, count = 0;
  for (int64_t g = 0; g < lookups.groups; ++g) {
    const int32_t* offsets = lookups.offsets + g * (lookups.bags + 1);
    const int64_t base = g * lookups.capacity;
    for (int64_t b = 0; b < lookups.bags; ++b) {
      for (int64_t position = base + offsets[b]; position < base + offsets[b + 1]; ++position) {
        int64_t id = ReadId(lookups, &shape, position);
        bag[position] = -1;
        if (id == kPadding && lookups.padded) continue;
        if (id < 0 || id >= num_embeddings) {
          ++out_of_range;
          if (lookups.bounds == Bounds::kError) return position;
          if (lookups.bounds == Bounds::kPoison) {
            bag[position] = PlanLayout::kPoisoned;
            continue;
          }
          // An empty table has no nearest row.
          if (lookups.bounds == Bounds::kZero || lookups.bounds == Bounds::kWarn || num_embeddings == 0) continue;
          id = id < 0 ? 0 : num_embeddings - 1;
        }
        bag[position] = static_cast<int32_t>(g * lookups.bags + b);
        scratch.positions[count] = static_cast<int32_t>(position);
        scratch.ids[count++] = id;
      }
    }
    for (int64_t position = base + offsets[lookups.bags]; position < base + lookups.capacity; ++position)
      bag[position] = -1;
  }
  scratch.count = count;
  header[PlanLayout::kValid] = static_cast<int32_t>(count);
  header[PlanLayout::kOutOfRange] = static_cast<int32_t>(out_of_range);
  return kNone;
}

// Returns the error of Bounds::kError, or makes the report of Bounds::kWarn, after CollectIds.
Status Settle(const Lookups& lookups, const TTShape& shape, int64_t refused, const int32_t* header) {
  if (refused != kNone) return RefuseId(lookups, &shape, shape.num_embeddings, refused);
  const int32_t count = header[PlanLayout::kOutOfRange];
  if (lookups.bounds == Bounds::kWarn && count > 0) ReportFirst(lookups, &shape, shape.num_embeddings, count);
  return {};
}

// A hash of the offsets and of the ids in bags, word by word.
int32_t Fingerprint(const Lookups& lookups) {
  uint64_t hash = static_cast<uint64_t>(lookups.groups);
  const auto add = [&hash](const void* memory, int64_t words) {
    const int32_t* word = static_cast<const int32_t*>(memory);
    for (int64_t i = 0; i < words; ++i) hash = (hash ^ static_cast<uint32_t>(word[i])) * 0x9e3779b97f4a7c15u;
  };
  add(lookups.offsets, lookups.groups * (lookups.bags + 1));
  for (int64_t g = 0; g < lookups.groups; ++g)
    add(static_cast<const int32_t*>(lookups.ids) + g * lookups.capacity * lookups.words_per_id,
        lookups.offsets[g * (lookups.bags + 1) + lookups.bags] * lookups.words_per_id);
  return static_cast<int32_t>(hash >> 32);
}

// Radix of the chain key at each level: key(k) = slice(k) * range[k - 1] + key(k - 1).
struct ChainRadix {
  uint64_t range[kMaxCores + 1];
  ChainRadix(const TTShape& shape, const Side& side) {
    range[0] = 1;
    for (int k = 1; k <= side.depth; ++k) range[k] = range[k - 1] * static_cast<uint64_t>(shape.p[side.core[k]]);
  }
};

// Converts linear ids to keys that sort rows by primary chain, then by secondary chain.
class RowKeys {
 public:
  RowKeys(const TTShape& shape, const Contraction& contraction) : d_(shape.d) {
    const ChainRadix primary(shape, contraction.primary), secondary(shape, contraction.secondary);
    const uint64_t secondary_range = secondary.range[contraction.secondary.depth];
    for (int k = 1; k <= contraction.primary.depth; ++k)
      weight_[contraction.primary.core[k]] = primary.range[k - 1] * secondary_range;
    for (int k = 1; k <= contraction.secondary.depth; ++k)
      weight_[contraction.secondary.core[k]] = secondary.range[k - 1];
    for (int k = 0; k < d_; ++k) factor_.emplace_back(static_cast<uint64_t>(shape.p[k]));
  }

  uint64_t operator()(uint64_t id) const {
    uint64_t key = 0;
    for (int k = d_ - 1; k > 0; --k) {
      const Divider& p = factor_[static_cast<size_t>(k)];
      const uint64_t quotient = p.Quotient(id);
      key += (id - quotient * p.divisor()) * weight_[k];
      id = quotient;
    }
    return key + id * weight_[0];
  }

 private:
  int d_;
  uint64_t weight_[kMaxCores] = {};
  std::vector<Divider> factor_;
};

// Builds levels depth .. 1 of one side of a chunk of `rows` rows, whose chain keys are in scratch.keys (overwritten).
void BuildLevels(const TTShape& shape, const Side& side, bool rows_sorted, int64_t rows, const SideScratch& scratch,
                 const PlanLayout& layout, int first_level, int64_t chunk_begin, int32_t* plan, int32_t* counts) {
  const ChainRadix radix(shape, side);
  int64_t items = rows;
  for (int k = side.depth; k >= 1; --k) {
    const LevelView<int32_t> level = layout.level(plan, first_level + k - 1, chunk_begin);
    if (rows_sorted && k == side.depth) {
      for (int64_t i = 0; i < items; ++i) level.child[i] = static_cast<int32_t>(i);
    } else {
      Grouper(scratch.sorting).Sort(scratch.keys, items, radix.range[k], level.child);
    }
    const int64_t nodes =
        Grouper::Runs(scratch.keys, items, level.child, level.child_end, level.node_of_child, scratch.node_keys);
    counts[k - 1] = static_cast<int32_t>(nodes);
    const Divider parents(radix.range[k - 1]);
    for (int64_t u = 0; u < nodes; ++u) {
      const uint64_t slice = parents.Quotient(scratch.node_keys[u]);
      level.slice[u] = static_cast<int32_t>(slice);
      scratch.keys[u] = scratch.node_keys[u] - slice * parents.divisor();
    }
    items = nodes;
  }
}

// Builds one side of every chunk.
void BuildSide(const TTShape& shape, const Contraction& contraction, bool primary, int64_t rows,
               const uint64_t* row_keys, const SideScratch& scratch, const PlanLayout& layout, int32_t* plan) {
  const ChainRadix secondary(shape, contraction.secondary);
  const Divider range(secondary.range[contraction.secondary.depth]);
  const int first_level = primary ? 0 : contraction.primary.depth;
  for (int64_t c = 0, begin = 0; begin < rows; ++c, begin += layout.chunk_rows) {
    const int64_t count = std::min(layout.chunk_rows, rows - begin);
    int32_t* chunk = layout.chunk(plan, c);
    if (primary) chunk[0] = static_cast<int32_t>(begin + count);
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t key = row_keys[begin + i], quotient = range.Quotient(key);
      scratch.keys[i] = primary ? quotient : key - quotient * range.divisor();
    }
    BuildLevels(shape, primary ? contraction.primary : contraction.secondary, /*rows_sorted=*/primary, count, scratch,
                layout, first_level, begin, plan, chunk + 1 + first_level);
  }
}

// Sorts positions by key and numbers the rows; their keys are in scratch.row_keys.
int64_t BuildRows(uint64_t range, const PlanLayout& layout, Scratch& scratch, int32_t* plan) {
  const uint64_t* keys = scratch.keys;
  uint64_t* row_keys = scratch.row_keys;
  int32_t* order = layout.order(plan);
  int32_t* row_end = layout.row_end(plan);
  int32_t* row_of = layout.row_of(plan);
  Grouper(scratch.sorting).Sort(keys, scratch.count, range, order);
  int64_t rows = 0;
  for (int64_t i = 0; i < scratch.count; ++i) {
    const uint64_t key = keys[order[i]];
    if (rows == 0 || key != row_keys[rows - 1]) row_keys[rows++] = key;
    row_end[rows - 1] = static_cast<int32_t>(i + 1);
    order[i] = scratch.positions[order[i]];
    row_of[order[i]] = static_cast<int32_t>(rows - 1);
  }
  int32_t* header = layout.header(plan);
  header[PlanLayout::kRows] = static_cast<int32_t>(rows);
  header[PlanLayout::kChunks] = static_cast<int32_t>((rows + layout.chunk_rows - 1) / layout.chunk_rows);
  return rows;
}

}  // namespace

bool IsPlanOf(const PlanLayout& layout, const Lookups& lookups, const int32_t* plan) {
  const int32_t* header = layout.header(plan);
  return header[PlanLayout::kPositions] == lookups.size() && header[PlanLayout::kFingerprint] == Fingerprint(lookups);
}

Status BuildTTPlan(const TTShape& shape, const Contraction& contraction, const Lookups& lookups, const Pool& pool,
                   int32_t* plan) {
  const PlanLayout layout = MakeLayout(shape, contraction, lookups.size());
  int32_t* header = layout.header(plan);
  std::fill_n(header, PlanLayout::kHeader, 0);
  if (Status status = CheckOffsets(lookups.offsets, lookups.groups, lookups.bags, lookups.capacity); !status.ok())
    return status;
  Scratch scratch;
  SideScratch primary, secondary;
  Workspace workspace;
  scratch.RequestBuffers(layout.n, workspace);
  workspace.Request(&primary.node_keys, layout.n);
  workspace.Request(&secondary.keys, layout.n);
  workspace.Request(&secondary.node_keys, layout.n);
  workspace.Request(&secondary.sorting, Grouper::BufferSize(layout.n));
  if (Status status = workspace.Allocate(); !status.ok()) return status;
  primary.keys = scratch.keys;  // no longer needed once the rows are sorted
  primary.sorting = scratch.sorting;

  // A plan of fewer ids is finished before a helper thread starts.
  constexpr int64_t kBlock = 2048;
  const RowKeys key(shape, contraction);
  int64_t refused = kNone, rows = 0;
  Phases phases;
  phases.Add(2, [&](int64_t task, int) {
    if (task == 0) {
      refused = CollectIds(lookups, shape, layout.bag(plan), scratch, header);
    } else {
      header[PlanLayout::kPositions] = static_cast<int32_t>(layout.n);
      header[PlanLayout::kFingerprint] = Fingerprint(lookups);
    }
  });
  // After an error, the count of ids is 0, and the following phases do nothing.
  phases.AddBlocks(layout.n, kBlock, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < std::min(end, scratch.count); ++i)
      scratch.keys[i] = key(static_cast<uint64_t>(scratch.ids[i]));
  });
  phases.Add(1,
             [&](int64_t, int) { rows = BuildRows(static_cast<uint64_t>(shape.num_rows()), layout, scratch, plan); });
  phases.Add(2, [&](int64_t task, int) {
    BuildSide(shape, contraction, /*primary=*/task == 0, rows, scratch.row_keys, task == 0 ? primary : secondary,
              layout, plan);
  });
  phases.Run(layout.n < kBlock ? 1 : pool.workers, pool.schedule);
  return Settle(lookups, shape, refused, header);
}

}  // namespace jax_tt
