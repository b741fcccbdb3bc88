// The steps of the library's rules, compiled once per instruction set as kernels_isa.cc is.
//
// A source of their own, since it is all that a change of a rule compiles again for the CPU.
#include "ffi/core/optimizers/optimizers.h"
#include "ffi/cpu/kernels/kernels.h"
#include "ffi/cpu/kernels/update_row.h"

namespace jax_tt {
namespace JAX_TT_ISA {

#define JAX_TT_UPDATE_FLOAT(Rule) UpdateRow<float, Rule>,
#define JAX_TT_UPDATE_DOUBLE(Rule) UpdateRow<double, Rule>,
extern const RowUpdate<float> kFloatUpdates[] = {JAX_TT_OPTIMIZERS(JAX_TT_UPDATE_FLOAT)};
extern const RowUpdate<double> kDoubleUpdates[] = {JAX_TT_OPTIMIZERS(JAX_TT_UPDATE_DOUBLE)};

}  // namespace JAX_TT_ISA
}  // namespace jax_tt
