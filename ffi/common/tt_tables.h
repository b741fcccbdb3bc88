// The arguments of passes over TT tables, of one or of many in a call, as the handlers of every platform read them.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "ffi/common/call_args.h"
#include "ffi/common/table_reader.h"

namespace jax_tt {

// What all passes over one table are given; its cores are the arguments from `first_core` on.
struct TTTableArgs {
  const TTShape& shape;
  const ffi::Dictionary& attrs;
  BatchArgs batch;
  const Args& args;
  size_t first_core;
};

struct TTForwardArgs {
  const ffi::AnyBuffer &sentinel, &out, &plan, &saved;
};

// What comes from the forward pass, the gradients of the vectors and of the weights, and the results of the cores from
// `first_result` on.
struct TTGradientArgs {
  const ffi::AnyBuffer &plan, &saved, &out_gradient, &weight_gradient;
  const Rets& rets;
  size_t first_result;
};

// They call `read` for one table after another of a call on many.  The arguments of a forward pass are ids, offsets,
// weights, sentinel and cores, and its results out, plan, and saved; the plan is empty if no other op needs it.
using ReadTTForward = std::function<Status(const TTTableArgs&, const TTForwardArgs&)>;
Status ReadTTForwardTables(const TablesCall& call, const ReadTTForward& read);

using ReadTTBackward = std::function<Status(const TTTableArgs&, const ffi::AnyBuffer& touched, const TTGradientArgs&)>;
Status ReadTTBackwardTables(const TablesCall& call, const ReadTTBackward& read);

// `applied`: of the table, in memory of the device.
using ReadTTUpdate = std::function<Status(const TTTableArgs&, const TTGradientArgs&, const StepArgs&, float* applied)>;
Status ReadTTUpdateTables(const TablesCall& call, const ReadTTUpdate& read);

// What an update with gradients from elsewhere is given of a table: which slices were touched, cores with their slots,
// and the gradients of the cores, which are the arguments from `first_gradient` on.
struct TTApplyArgs {
  std::string_view table;
  const TTShape& shape;
  const ffi::AnyBuffer& touched;
  const Args& args;
  size_t first_core, first_gradient;
  const Rets& rets;
  size_t first_result;
};

using ReadTTApply = std::function<Status(const TTApplyArgs&, const StepArgs&, float* applied)>;
Status ReadTTApplyTables(const TablesCall& call, const ReadTTApply& read);

}  // namespace jax_tt
