#include "ffi/cpu/route/route.h"

#include <algorithm>

#include "ffi/core/cache.h"
#include "ffi/cpu/sort/group_by.h"
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

Status RouteBags(const RouteRequests& requests, const int32_t* bag, const BagRoute& found) {
  const int64_t devices = requests.devices, size = found.size, width = found.bags + 1;
  Workspace workspace;
  int64_t *count, *last;  // of every device: its requests so far, and the bag of the latest
  workspace.Request(&count, devices);
  workspace.Request(&last, devices);
  JAX_TT_RETURN_IF_ERROR(workspace.Allocate());
  std::fill_n(count, devices, 0);
  std::fill_n(last, devices, -1);
  // The offsets of the bags behind the latest one, up to `bag`.
  const auto begin_bags = [&](int64_t device, int64_t bag) {
    const int32_t begin = static_cast<int32_t>(std::min(count[device], size));
    int32_t* offsets = found.offsets + device * width;
    for (int64_t k = last[device] + 1; k <= bag; ++k) offsets[k] = begin;
    last[device] = bag;
  };
  for (int64_t i = 0; i < requests.n; ++i) {
    const int64_t device = requests.device[i];
    if (device < 0 || device > devices) return InvalidArgument("a device does not exist");
    if (device == devices) continue;
    if (bag[i] < std::max<int64_t>(last[device], 0) || bag[i] >= found.bags)
      return InvalidArgument("bags are not in their order");
    if (bag[i] > last[device]) begin_bags(device, bag[i]);
    const int64_t place = count[device]++;
    if (place >= size) continue;
    found.rows[device * size + place] = requests.row[i];
    found.source[device * size + place] = static_cast<int32_t>(i);
  }
  int64_t most = 0;
  for (int64_t device = 0; device < devices; ++device) {
    begin_bags(device, found.bags);
    most = std::max(most, count[device]);
    const int64_t used = std::min(count[device], size);
    std::fill_n(found.rows + device * size + used, size - used, 0);
    std::fill_n(found.source + device * size + used, size - used, static_cast<int32_t>(requests.n));
  }
  *found.most = static_cast<int32_t>(most);
  return {};
}

}  // namespace jax_tt
