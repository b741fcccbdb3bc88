// What the fits of coded tables do on the host, for the Python module.
#ifndef JAX_TT_CPU_CODED_PYTHON_H_
#define JAX_TT_CPU_CODED_PYTHON_H_

#include <nanobind/nanobind.h>

namespace jax_tt {

void AddCodes(nanobind::module_& m);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_CODED_PYTHON_H_
