#include "ffi/common/rules.h"

#include <cstddef>
#include <deque>
#include <mutex>
#include <string>

#include "ffi/core/optimizers/optimizers.h"

namespace jax_tt {
namespace {

struct Entry {
  std::string name;
  ExportedRule rule;
};

struct Registry {
  std::mutex mutex;
  std::deque<Entry> entries;  // whose elements stay where they are
};

// Never destroyed: XLA's threads may run ops until the process has gone.
Registry& TheRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

bool IsSame(const ExportedRule& a, const ExportedRule& b) {
  return a.update_float == b.update_float && a.update_double == b.update_double && a.launches == b.launches;
}

// The number of the rule of the library with that name; kNumOptimizers if there is none.
int OfLibrary(std::string_view name) {
  int kind = 0;
  while (kind < kNumOptimizers && name != kOptimizerNames[kind]) ++kind;
  return kind;
}

}  // namespace

Status AddRule(const ExportedRule& rule) {
  if (OfLibrary(rule.name) < kNumOptimizers)
    return InvalidArgument("rule: the library has a rule of the name '" + std::string(rule.name) +
                           "'. Give yours another one, such as 'my_package." + rule.name + "'");
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  for (const Entry& entry : registry.entries) {
    if (entry.name != rule.name) continue;
    if (IsSame(entry.rule, rule)) return {};
    return InvalidArgument("rule: this process has another rule of the name '" + entry.name +
                           "'. Give one of them another name; after a new build of an extension, start a new process");
  }
  registry.entries.push_back({rule.name, rule});
  return {};
}

Status FindRule(std::string_view name, int* kind) {
  if (*kind = OfLibrary(name); *kind < kNumOptimizers) return {};
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  for (size_t k = 0; k < registry.entries.size(); ++k)
    if (registry.entries[k].name == name) {
      *kind = kNumOptimizers + static_cast<int>(k);
      return {};
    }
  return InvalidArgument("this process has no rule '" + std::string(name) +
                         "'; import the extension that hands it to jax_tt.optimizers.register before the program runs. "
                         "If it is a rule of the library, compile the native module with `make native`");
}

const ExportedRule* ExportedOf(int kind) {
  if (kind < kNumOptimizers) return nullptr;
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  return &registry.entries[static_cast<size_t>(kind - kNumOptimizers)].rule;
}

OptimizerTraits RuleTraits(int kind) {
  const ExportedRule* exported = ExportedOf(kind);
  return exported == nullptr ? kOptimizers[kind] : exported->traits;
}

}  // namespace jax_tt
