// `KeyIndex` as a class of the Python module.
#ifndef JAX_TT_CPU_KEY_INDEX_PYTHON_H_
#define JAX_TT_CPU_KEY_INDEX_PYTHON_H_

#include <nanobind/nanobind.h>

namespace jax_tt {

void AddKeyIndex(nanobind::module_& m);

}  // namespace jax_tt

#endif  // JAX_TT_CPU_KEY_INDEX_PYTHON_H_
