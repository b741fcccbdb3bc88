// What one device asks others for: different rows, or sums of rows.
#pragma once

#include <stdint.h>

#include "ffi/common/status.h"

namespace jax_tt {

// Rows of devices; a device of `devices` stands for none.
struct RouteRequests {
  const int32_t* device;
  const int32_t* row;
  int64_t n;
  int64_t devices;
};

// As jax_tt._kinds.sharded.route.Distinct.
struct DistinctRoute {
  int32_t* device;
  int32_t* row;
  int32_t* source;
  int32_t* places;
};

Status DistinctRows(const RouteRequests& requests, const DistinctRoute& found);

// As jax_tt._kinds.sharded.spread.Places.
struct BagRoute {
  int32_t* rows;     // [devices, size]
  int32_t* source;   // [devices, size]
  int32_t* offsets;  // [devices, bags + 1]
  int32_t* most;     // [1]
  int64_t size;
  int64_t bags;
};

// Requests of position i are of the bag `bag[i]`, in the order of the bags.
Status RouteBags(const RouteRequests& requests, const int32_t* bag, const BagRoute& found);

}  // namespace jax_tt
