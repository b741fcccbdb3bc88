// The arguments of passes over TT tables, any number of them in a call, as the handlers of every platform read them.
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

// They call `read` for one table after another.  With n ids, digits of d cores where they are split, in G groups of B
// bags and tables of D columns, the arguments and results of a table are, in this order:
//
// forward   ids [G.., n / G] or [G.., n / G, d], offsets s32 [G.., B + 1], weights [n] or empty, sentinel f32 [], cores
//           -> out [G.., B, D], plan s32 [PlanLayout::size() or more] or empty if no other op needs it,
//           saved [n, elements] or empty
// backward  ids, offsets, weights, plan, saved, out gradient [G.., B, D], cores
//           -> touched s32 [sum of row factors], weight gradient [n] or empty, core gradients
// update    the result of the forward pass, which orders the update after it, ids, offsets, weights, plan, saved, out
//           gradient, cores, slots core by core -> weight gradient, cores and slots in place
// apply     touched, cores, slots, core gradients -> cores and slots in place
using ReadTTForward = std::function<Status(const TTTableArgs&, const TTForwardArgs&)>;
Status ReadTTForwardTables(const TablesCall& call, const ReadTTForward& read);

using ReadTTBackward = std::function<Status(const TTTableArgs&, const ffi::AnyBuffer& touched, const TTGradientArgs&)>;
Status ReadTTBackwardTables(const TablesCall& call, const ReadTTBackward& read);

// `applied`: of the table, in memory of the device.
using ReadTTUpdate = std::function<Status(const TTTableArgs&, const TTGradientArgs&, const StepArgs&, float* applied)>;
Status ReadTTUpdateTables(const TablesCall& call, const ReadTTUpdate& read);

// What an update with gradients from elsewhere is given of a table, whose core gradients are the arguments from
// `first_gradient` on.
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
