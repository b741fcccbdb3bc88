// How rules of extensions come from Python, in every native module: each has its own.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <stddef.h>

#include <stdexcept>
#include <string>

#include "ffi/common/rules.h"
#include "ffi/core/cache.h"
#include "ffi/core/hash.h"
#include "ffi/core/hash_calls.h"
#include "ffi/core/lookups.h"
#include "ffi/core/optimizers/optimizers.h"

namespace jax_tt {

// Adds the rule of a capsule; returns its name.  `version` of jax_tt, for errors.
inline nanobind::object AddRuleOf(nanobind::object capsule, const std::string& version) {
  if (!PyCapsule_IsValid(capsule.ptr(), kRuleCapsule))
    throw std::invalid_argument("rule: expected a capsule of the name '" + std::string(kRuleCapsule) +
                                "' with the address of a jax_tt::ExportedRule");
  const auto& rule = *static_cast<const ExportedRule*>(PyCapsule_GetPointer(capsule.ptr(), kRuleCapsule));
  if (rule.abi != kRuleAbi)
    throw std::invalid_argument("rule: the extension was compiled with headers of another version (ABI " +
                                std::to_string(rule.abi) + ", expected " + std::to_string(kRuleAbi) +
                                "); rebuild the extension against jax_tt " + version);
  if (rule.name == nullptr || *rule.name == '\0')
    throw std::invalid_argument("rule: it has no name; give jax_tt::ExportRule one, such as 'my_package.lion'");
  const OptimizerTraits& traits = rule.traits;
  if (traits.names == nullptr || traits.hyperparameters != CountNames(traits.names))
    throw std::invalid_argument("rule: '" + std::string(rule.name) + "' has " + std::to_string(traits.hyperparameters) +
                                " hyper-parameters and other names; declare them with JAX_TT_HYPERPARAMETERS");
  if (traits.element_slots < 0 || traits.element_slots > kMaxElementSlots || traits.row_slots < 0 ||
      traits.slots() > kMaxSlots)
    throw std::invalid_argument("rule: '" + std::string(rule.name) + "' has " + std::to_string(traits.element_slots) +
                                " slots per element and " + std::to_string(traits.row_slots) +
                                " per row; expected none or more, at most " + std::to_string(kMaxElementSlots) +
                                " per element and " + std::to_string(kMaxSlots) + " in all");
  if (rule.update_float == nullptr || rule.update_double == nullptr)
    throw std::invalid_argument("rule: '" + std::string(rule.name) +
                                "' has no step for float or for double; make it with jax_tt::ExportRule");
  auto name = nanobind::steal(PyUnicode_FromString(rule.name));
  if (!name.is_valid()) {
    PyErr_Clear();
    throw std::invalid_argument("rule: its name is not UTF-8");
  }
  if (const Status status = AddRule(rule); !status.ok()) throw std::invalid_argument(status.message);
  return name;
}

// The names of the hyper-parameters of a rule in their order, which may have spaces around their commas.
inline nanobind::object NamesOf(const OptimizerTraits& traits) {
  return nanobind::str(traits.names).attr("replace")(" ", "").attr("split")(",");
}

// The names of the hyper-parameters of a rule in their order, and its numbers of slots per element and per row; None
// if there is none of this name.
inline nanobind::object RuleOfName(const std::string& name) {
  int kind;
  if (!FindRule(name, &kind).ok()) return nanobind::none();
  const OptimizerTraits traits = RuleTraits(kind);
  return nanobind::make_tuple(NamesOf(traits), traits.element_slots, traits.row_slots);
}

// The names of a list, in its order.
template <size_t N>
nanobind::list NamesOf(const char* const (&names)[N]) {
  nanobind::list found;
  for (const char* name : names) found.append(name);
  return found;
}

// The lists of names that Python has, too; those of counts and counters in the same order.
inline nanobind::dict Lists() {
  nanobind::dict lists;
  lists["hash counts"] = NamesOf(kHashCountedNames);
  lists["cache observed"] = NamesOf(kCacheObservedNames);
  lists["cache populated"] = NamesOf(kCachePopulatedNames);
  lists["counter rates"] = NamesOf(CounterRowWiseAdagrad<float>::kRates);
  lists["counter decays"] = NamesOf(CounterRowWiseAdagrad<float>::kDecays);
  lists["hash policies"] = NamesOf(kHashPolicyNames);
  lists["hash checks"] = NamesOf(HashCheck::kNames);
  lists["cache policies"] = NamesOf(kCachePolicyNames);
  lists["bounds"] = NamesOf(kBoundsNames);
  return lists;
}

// What Python must know of the rules and of the lists of a module.
inline void AddNames(nanobind::module_& m) {
  m.def("add_rule", &AddRuleOf, nanobind::arg("rule").none(), nanobind::arg("version"),
        "Adds a rule of an extension; returns its name.");
  m.def("rule", &RuleOfName, nanobind::arg("name"),
        "The names of the hyper-parameters of a rule in their order, and its numbers of slots per element and per row; "
        "None if there is none of this name.");
  m.def("rules", [] { return NamesOf(kOptimizerNames); }, "Names of the rules of the library.");
  m.def("lists", &Lists, "The lists of names that Python has, too.");
}

}  // namespace jax_tt
