// The different rows that one device asks others for.
#ifndef JAX_TT_CPU_ROUTE_H_
#define JAX_TT_CPU_ROUTE_H_

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

// As jax_tt._sharding.route.Distinct.
struct DistinctRoute {
  int32_t* device;
  int32_t* row;
  int32_t* source;
  int32_t* places;
};

Status DistinctRows(const RouteRequests& requests, const DistinctRoute& found);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_ROUTE_H_
