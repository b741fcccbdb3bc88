#include <atomic>
#include <string>
#include <string_view>
#include <utility>

#include "ffi/common/reports.h"
#include "ffi/cpu/hash/hash.h"

namespace jax_tt {
namespace {

class Search : public Pass {
 public:
  explicit Search(const HashSearch& search) : search_(search) {}

  std::string_view table() const override { return {}; }
  void Request(int, Workspace&) override {}
  Status Plan() override { return {}; }
  std::vector<TaskSet> Rounds() override {
    return {BlockTasks(search_.batch.n, kBlock, [this](int64_t begin, int64_t end, int) { Find(begin, end); })};
  }
  Status Finish() override { return CheckKeys(search_.check, missing_.load()); }

 private:
  static constexpr int64_t kBlock = 1024;

  void Find(int64_t begin, int64_t end) {
    const bool* const present = search_.batch.present + begin;
    if (search_.guess == nullptr) return FindThose(begin, end, present);
    bool wanted[kBlock];
    if (MarkMoved(begin, end, wanted)) FindThose(begin, end, wanted);
    const int32_t absent = search_.absent;
    int32_t* const slots = search_.slots + begin;
    const int32_t* const guess = search_.guess + begin;
    for (int64_t i = 0; i < end - begin; ++i) {
      const int32_t known = !present[i] ? -1 : guess[i] < 0 ? absent : guess[i];
      slots[i] = wanted[i] ? slots[i] : known;
    }
  }

  // Marks the keys that have a guess, which is wrong; returns whether there are any.
  bool MarkMoved(int64_t begin, int64_t end, bool* moved) const {
    constexpr int64_t kAhead = 16;
    const HashDirectory& directory = search_.directory;
    bool any = false;
    for (int64_t i = begin - kAhead; i < end; ++i) {
      if (const int64_t next = i + kAhead; next < end) PrefetchSetOf(search_.guess[next]);
      if (i < begin) continue;
      const int32_t slot = search_.guess[i];
      moved[i - begin] =
          search_.batch.present[i] && slot >= 0 && !directory.Holds(slot, HashWord(search_.batch.keys, i));
      any |= moved[i - begin];
    }
    return any;
  }

  void PrefetchSetOf(int32_t slot) const {
    const HashDirectory& directory = search_.directory;
    if (slot < 0 || slot >= directory.capacity()) return;
    const uint32_t set = static_cast<uint32_t>(slot) / static_cast<uint32_t>(directory.ways);
    const int64_t word = 2 * set * directory.ways + (slot - set * directory.ways);
    __builtin_prefetch(directory.keys + word);
    __builtin_prefetch(directory.keys + word + directory.ways);
  }

  // Finds the keys that are wanted; the other slots are -1.
  void FindThose(int64_t begin, int64_t end, const bool* wanted) {
    const uint32_t* const keys = search_.batch.keys + 2 * begin;
    int32_t* const slots = search_.slots + begin;
    GetHashKernels().find(search_.directory, keys, wanted, end - begin, slots);
    const int32_t absent = search_.absent;
    int64_t missing = 0;
    for (int64_t i = 0; i < end - begin; ++i) {  // without a branch, so that the compiler uses vector instructions
      const bool is_missing = wanted[i] & (slots[i] < 0);
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
