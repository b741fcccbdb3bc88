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

}  // namespace

Status AddRule(const ExportedRule& rule) {
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

Status FindRule(int64_t number, int* kind) {
  if (number < 0 || number >= kNumOptimizers)
    return InvalidArgument("unknown optimizer " + std::to_string(number) + ": the native module has those from 0 to " +
                           std::to_string(kNumOptimizers - 1) +
                           ". If a rule was added to the sources, the module is older than they are: compile it with "
                           "`make native`");
  *kind = static_cast<int>(number);
  return {};
}

Status FindRule(std::string_view name, int* kind) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  for (size_t k = 0; k < registry.entries.size(); ++k)
    if (registry.entries[k].name == name) {
      *kind = kNumOptimizers + static_cast<int>(k);
      return {};
    }
  return InvalidArgument("this process has no rule '" + std::string(name) +
                         "'; import the extension that hands it to jax_tt.optimizers.register before the program runs");
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
