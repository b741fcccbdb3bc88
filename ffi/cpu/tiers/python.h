// What the tiers of tables do on the host, for the Python module.
#ifndef JAX_TT_CPU_TIERS_PYTHON_H_
#define JAX_TT_CPU_TIERS_PYTHON_H_

#include <nanobind/nanobind.h>

namespace jax_tt {

void AddTiers(nanobind::module_& m);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_TIERS_PYTHON_H_
