// The rules of this process: those of the library, then those of extensions in the order in which they came.
//
// Programs have their names, as they may run in another process later.
#pragma once

#include <string_view>

#include "ffi/common/status.h"
#include "ffi/core/optimizers/exported_rule.h"
#include "ffi/core/optimizers/rule.h"

namespace jax_tt {

// Adds the rule of an extension.  Adding it again has no effect; the name of another rule is an error.
Status AddRule(const ExportedRule& rule);

// The kind of the rule with that name.
Status FindRule(std::string_view name, int* kind);

// The rule of an extension; null for one of the library.  It stays where it is.
const ExportedRule* ExportedOf(int kind);

OptimizerTraits RuleTraits(int kind);

}  // namespace jax_tt
