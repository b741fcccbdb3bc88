// The arguments of passes over dense tables, any number of them in a call, as the handlers of every platform read them.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "ffi/common/call_args.h"
#include "ffi/common/table_reader.h"
#include "ffi/core/bag_vectors.h"

namespace jax_tt {

// What all passes over one table are given.
struct TableArgs {
  ffi::Dictionary attrs;
  BatchArgs batch;
  const ffi::AnyBuffer& table;
  Span64 columns = {};  // of its features, where one array has the vectors of all tables
};

struct ForwardArgs {
  const ffi::AnyBuffer &sentinel, &out;
};
struct BackwardArgs {
  const ffi::AnyBuffer &out_gradient, &weight_gradient, &gradient;
};
struct UpdateArgs {
  const StepArgs& step;
  const SlotBuffers& slots;
  float* applied;  // of this table; memory of the device
  const ffi::AnyBuffer &out_gradient, &weight_gradient, &new_table;
};

// They call read(args, own) for one table after another.  With n ids in G groups of B bags and a table of N rows of D
// columns, the arguments and results of a table are, in this order:
//
// forward   ids [G.., n / G], offsets s32 [G.., B + 1], weights [n] or empty, sentinel f32 [], table
//           -> out [G.., B, D]
// backward  ids, offsets, weights, out gradient [G.., B, D], table -> weight gradient [n] or empty, table gradient [N,
// D] update    the result of the forward pass, which orders the update after it, ids, offsets, weights, out gradient,
// table
//           and its slots -> weight gradient, table and slots in place
//
// A table is [N, D].  It and its slots may be rows of a stack, as `TableReader::ReadRowArgs` reads them.  Quantized
// rows, with the attributes bits and dim, are u8 [N, W] or f32 [N, W / 4] and have no backward pass and no update.
// With the attribute columns of the call, the vectors of all bags are columns of one array [samples, width], from these
// columns on, `features` of them for a table.  The array comes before the first table: the result out, or the argument
// out gradient, before which the update has the result of the forward pass.
Status ReadForwardTables(const TablesCall& call,
                         const std::function<Status(const TableArgs&, const ForwardArgs&)>& read);
Status ReadBackwardTables(const TablesCall& call,
                          const std::function<Status(const TableArgs&, const BackwardArgs&)>& read);
Status ReadUpdateTables(const TablesCall& call, const std::function<Status(const TableArgs&, const UpdateArgs&)>& read);

// The vectors of all `bags` bags of a table, alone in `buffer` or among those of other tables.
template <typename Element>
Status ReadVectors(const Span64& columns, const ffi::AnyBuffer& buffer, std::string_view name, int64_t bags,
                   int64_t dim, BagVectors* vectors, Element** data) {
  if (columns.size() == 0) return Data(buffer, name, bags * dim, data);
  const auto sizes = buffer.dimensions();
  if (sizes.size() != 2) return InvalidArgument("an array of all features has two axes");
  if (static_cast<int64_t>(columns.size()) * sizes[0] != bags)
    return InvalidArgument("a feature must have one bag per sample");
  for (int64_t column : columns)
    if (column < 0 || column > sizes[1] - dim) return InvalidArgument("columns are beyond the array");
  *vectors = {columns.begin(), sizes[0], sizes[1]};
  return Data(buffer, name, -1, data);
}

}  // namespace jax_tt
