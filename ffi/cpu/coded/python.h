// What the fits of coded tables do on the host, for the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace jax_tt {

void AddCodes(nanobind::module_& m);

}  // namespace jax_tt
