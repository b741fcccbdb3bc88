// What the tiers of tables do on the host, for the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace jax_tt {

void AddTiers(nanobind::module_& m);

}  // namespace jax_tt
