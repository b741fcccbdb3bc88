#include "ffi/cpu/route.h"

#include "ffi/core/cache.h"
#include "ffi/cpu/group_by.h"
#include "ffi/cpu/workspace.h"

namespace jax_tt {

Status DistinctRows(const RouteRequests& requests, const DistinctRoute& found) {
  const int64_t n = requests.n;
  Workspace workspace;
  uint64_t *keys, *buffer, *group_key;
  int32_t *order, *end;
  workspace.Request(&keys, n);
  workspace.Request(&buffer, Grouper::BufferSize(n));
  workspace.Request(&group_key, n);
  workspace.Request(&order, n);
  workspace.Request(&end, n);
  JAX_TT_RETURN_IF_ERROR(workspace.Allocate());
  for (int64_t i = 0; i < n; ++i) {
    const int32_t device = requests.device[i];
    if (device < 0 || device > requests.devices) return InvalidArgument("a device does not exist");
    keys[i] = static_cast<uint64_t>(device) << 32 | CacheMix(static_cast<uint32_t>(requests.row[i]));
  }
  Grouper(buffer).Sort(keys, n, static_cast<uint64_t>(requests.devices + 1) << 32, order);
  const int64_t groups = Grouper::Runs(keys, n, order, end, found.places, group_key);
  for (int64_t group = 0; group < n; ++group) {
    if (group >= groups) {
      found.device[group] = static_cast<int32_t>(requests.devices);
      found.row[group] = 0;
      found.source[group] = static_cast<int32_t>(n);
      continue;
    }
    const int32_t first = order[group == 0 ? 0 : end[group - 1]];
    found.device[group] = static_cast<int32_t>(group_key[group] >> 32);
    found.row[group] = requests.row[first];
    found.source[group] = first;
  }
  return {};
}

}  // namespace jax_tt
