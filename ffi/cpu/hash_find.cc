#include <atomic>
#include <string>
#include <string_view>
#include <utility>

#include "ffi/common/reports.h"
#include "ffi/cpu/hash.h"

namespace jax_tt {
namespace {

class Search : public Pass {
 public:
  explicit Search(const HashSearch& search) : search_(search) {}

  std::string_view table() const override { return {}; }
  void Request(int, Workspace&) override {}
  Status Plan() override { return {}; }
  std::vector<TaskSet> Rounds() override {
    constexpr int64_t kBlock = 1024;
    return {BlockTasks(search_.batch.n, kBlock, [this](int64_t begin, int64_t end, int) { Find(begin, end); })};
  }
  Status Finish() override { return CheckKeys(search_.check, missing_.load()); }

 private:
  void Find(int64_t begin, int64_t end) {
    const HashBatch& batch = search_.batch;
    int32_t* const slots = search_.slots;
    GetHashKernels().find(search_.directory, batch.keys + 2 * begin, batch.present + begin, end - begin, slots + begin);
    const int32_t absent = search_.absent;
    int64_t missing = 0;
    for (int64_t i = begin; i < end; ++i) {  // without a branch, so that the compiler uses vector instructions
      const bool is_missing = batch.present[i] & (slots[i] < 0);
      missing += is_missing;
      slots[i] = is_missing ? absent : slots[i];
    }
    if (missing != 0) missing_.fetch_add(missing, std::memory_order_relaxed);
  }

  const HashSearch search_;
  std::atomic<int64_t> missing_{0};
};

}  // namespace

std::unique_ptr<Pass> HashFind(const HashSearch& search) { return std::make_unique<Search>(search); }

Status CheckKeys(const HashCheck& check, int64_t count) {
  if (count == 0 || check.mode == HashCheck::kIgnore) return {};
  std::string message(check.message);
  if (check.mode == HashCheck::kWarn) {
    Post({.count = count, .message = std::move(message)});
    return {};
  }
  constexpr std::string_view kCount = "{count}";
  if (const size_t place = message.find(kCount); place != std::string::npos)
    message.replace(place, kCount.size(), std::to_string(count));
  return InvalidArgument(std::move(message));
}

}  // namespace jax_tt
