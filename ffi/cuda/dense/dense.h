// Bags of rows of dense tables on the GPU, of one table or of many at once.  Every function only enqueues work on the
// stream.
#pragma once

#include <stdint.h>

#include <string_view>
#include <type_traits>
#include <vector>

#include "ffi/common/status.h"
#include "ffi/core/bag_vectors.h"
#include "ffi/core/half.h"
#include "ffi/core/host_device.h"
#include "ffi/core/lookups.h"
#include "ffi/core/optimizers/rule.h"
#include "ffi/core/optimizers/slot_arrays.h"
#include "ffi/core/packed_rows.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {

enum class Storage : int8_t { kFloat32, kBfloat16, kFloat16, kPacked };

// The type of tables of packed rows, of any number of bits.
struct PackedRow {};

template <typename T>
constexpr Storage kStorage = std::is_same_v<T, bfloat16>    ? Storage::kBfloat16
                             : std::is_same_v<T, float16>   ? Storage::kFloat16
                             : std::is_same_v<T, PackedRow> ? Storage::kPacked
                                                            : Storage::kFloat32;

// The lookups of a batch and the sizes of the table, as kernels take them.
struct DenseBatch {
  IdType type = IdType::kInt32;  // never kDigits
  bool padded = false;
  Bounds bounds = Bounds::kPoison;
  const void* ids = nullptr;         // [groups, capacity]
  const int32_t* offsets = nullptr;  // [groups, bags + 1]
  const float* weights = nullptr;    // [n], or null for ones
  int64_t groups = 0, capacity = 0, bags = 0;
  int64_t num_embeddings = 0, dim = 0;
  Notice* notice = nullptr;

  JAX_TT_INLINE int64_t n() const { return groups * capacity; }
  JAX_TT_INLINE int64_t total_bags() const { return groups * bags; }
};

// How the elements of a table are moved.  By the table alone: the widths decide how sums are divided over threads, and
// so their last bits.
struct DenseWidths {
  bool four_wide = false;        // rows of the table and of its slots, in packets of 4
  bool vectors_aligned = false;  // those of bags too; otherwise one element at a time
};

// A table whose rows are summed.
struct ForwardTable {
  static constexpr int kLaunches = 1;

  DenseBatch batch;
  const void* values = nullptr;     // [num_embeddings, dim], or packed rows
  int bits = 0;                     // of the numbers of packed rows
  PackedLevels levels;              // of these numbers
  const float* sentinel = nullptr;  // []
  float* out = nullptr;             // a vector for every bag, NaN where the sentinel moved
  BagVectors vectors;
  Storage storage = Storage::kFloat32;
  DenseWidths widths;
};

// One optimizer step.  The pointers are device memory.
struct DenseStep {
  int kind = 0;
  bool skip_nonfinite = false;
  bool stochastic_rounding = false;
  const float* hyper = nullptr;    // [hyper-parameters of the optimizer]
  const float* scale = nullptr;    // [2]: multiplies every gradient; 0 where the step may not be taken
  const uint32_t* seed = nullptr;  // [2]
};

// Where the arrays of the plan that all tables share have those of one table.
struct PlanPlace {
  int64_t key = 0, partial = 0;
  int32_t position = 0, piece = 0, table = 0;
};

// A table whose rows get gradients.
struct GradientTable {
  static constexpr int kLaunches = 6;

  DenseBatch batch;
  void* values = nullptr;               // [num_embeddings, dim], which an update changes in place
  const float* out_gradient = nullptr;  // a vector for every bag
  BagVectors vectors;
  float* weight_gradient = nullptr;  // [n], or null; zero where a position reads no row
  Storage storage = Storage::kFloat32;
  DenseWidths widths;
  PlanPlace place;  // set by the pass

  // Of a backward pass.
  float* gradient = nullptr;  // [num_embeddings, dim], zero where no lookup reads

  // Of an update.
  SlotArrays slots;  // changed in place
  DenseStep step;
  float* applied = nullptr;  // []
};

// What the workspace depends on.
struct DenseSize {
  int64_t num_embeddings, dim, n;
};

// Bytes of workspace for an op ("forward", "backward" or "update") on these tables, whose vectors have this many
// columns of one array, 0 where every table has an array of its own.
Status DenseWorkspace(std::string_view op, const std::vector<DenseSize>& sizes, int64_t columns, int64_t* bytes);

// Fills `out` of every table.
Status DenseForward(cudaStream_t stream, std::vector<ForwardTable> tables, void* workspace);

// Fills `gradient` and `weight_gradient` of every table.
Status DenseBackward(cudaStream_t stream, std::vector<GradientTable> tables, void* workspace);

// Backward pass and optimizer step of the rows that were read, in place.  *applied: 1, or 0 when the step of that table
// was skipped: for gradients that are not finite, if `step` says so, and for bad offsets and ids that make NaN of their
// bags always.
Status DenseUpdate(cudaStream_t stream, std::vector<GradientTable> tables, void* workspace);

}  // namespace jax_tt
