// Rows of hash tables: initial values and exchange.
#include <string.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/core/half.h"
#include "ffi/cpu/hash/hash.h"
#include "ffi/cpu/prefetch.h"

namespace jax_tt {
namespace {

// The positions up to the last one for which `wanted(position)` is true.  The new keys of a batch come first, and most
// often there are few: there is no need to wake other threads for the rest.
template <typename F>
int64_t CountUpToLast(int64_t n, F&& wanted) {
  while (n > 0 && !wanted(n - 1)) --n;
  return n;
}

// Initial rows of the keys at positions i for which place(i) is not negative, which is the number of the row.
template <typename T, typename Place>
class InitialRows : public Pass {
 public:
  InitialRows(const InitialValues& values, const HashBatch& batch, int64_t features, T* rows, Place place)
      : values_(values), batch_(batch), features_(features), rows_(rows), place_(place) {}

  std::string_view table() const override { return {}; }
  void Request(int, Workspace&) override {}
  Status Plan() override { return {}; }
  std::vector<TaskSet> Rounds() override {
    constexpr int64_t kBlock = 128;
    const int64_t count = CountUpToLast(batch_.n, [this](int64_t i) { return place_(i) >= 0; });
    return {BlockTasks(count, kBlock, [this](int64_t i, int64_t end, int) {
      for (; i < end; ++i)
        if (const int64_t place = place_(i); place >= 0) Write(i, rows_ + place * features_);
    })};
  }

 private:
  void Write(int64_t i, T* row) const {
    float part[kInitialPart];
    for (int64_t begin = 0; begin < features_; begin += kInitialPart) {
      const int64_t width = std::min(kInitialPart, features_ - begin);
      GetHashKernels().initial_part(values_, HashWord(batch_.keys, i), begin, width, part);
      for (int64_t j = 0; j < width; ++j) Round(static_cast<typename ComputeType<T>::type>(part[j]), row + begin + j);
    }
  }

  const InitialValues values_;
  const HashBatch batch_;
  const int64_t features_;
  T* const rows_;
  const Place place_;
};

template <typename T, typename Place>
std::unique_ptr<Pass> InitialRowsAt(const InitialValues& values, const HashBatch& batch, int64_t features, T* rows,
                                    Place place) {
  return std::make_unique<InitialRows<T, Place>>(values, batch, features, rows, place);
}

class Exchange : public Pass {
 public:
  explicit Exchange(HashExchanged exchange) : exchange_(std::move(exchange)), filled_(exchange_.arrays.size()) {}

  std::string_view table() const override { return {}; }
  void Request(int, Workspace& workspace) override {
    for (size_t k = 0; k < filled_.size(); ++k)
      if (const HashArray& array = exchange_.arrays[k]; array.constant)
        workspace.Request(&filled_[k], array.entry_bytes);
  }
  Status Plan() override {
    for (size_t k = 0; k < filled_.size(); ++k)
      if (const HashArray& array = exchange_.arrays[k]; array.constant)
        for (int64_t offset = 0; offset < array.entry_bytes; offset += array.item_bytes)
          memcpy(filled_[k] + offset, array.from, static_cast<size_t>(array.item_bytes));
    return {};
  }
  std::vector<TaskSet> Rounds() override {
    constexpr int64_t kBlock = 256;
    const auto& arrays = exchange_.arrays;
    const bool old_ones =
        std::any_of(arrays.begin(), arrays.end(), [](const HashArray& a) { return a.old != nullptr; });
    const int64_t n = exchange_.n;
    const int64_t count = old_ones ? n : CountUpToLast(n, [this](int64_t i) { return IsValid(i); });
    return {BlockTasks(count, kBlock, [this](int64_t begin, int64_t end, int) {
      for (size_t k = 0; k < filled_.size(); ++k) Run(exchange_.arrays[k], filled_[k], begin, end);
    })};
  }

 private:
  bool IsValid(int64_t i) const { return exchange_.slots[i] >= 0 && exchange_.slots[i] < exchange_.capacity; }

  void Run(const HashArray& array, const char* filled, int64_t begin, int64_t end) const {
    constexpr int64_t kAhead = 8;
    const int32_t* const slots = exchange_.slots;
    const auto bytes = static_cast<size_t>(array.entry_bytes);
    if (bytes == 0) return;  // XLA may pass a null pointer for an array without elements
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end && IsValid(i + kAhead))
        PrefetchLines(array.entries + slots[i + kAhead] * array.entry_bytes, std::min<int64_t>(array.entry_bytes, 512));
      char* const old = array.old == nullptr ? nullptr : array.old + i * array.entry_bytes;
      if (!IsValid(i)) {
        if (old != nullptr) memset(old, 0, bytes);
        continue;
      }
      char* const entry = array.entries + slots[i] * array.entry_bytes;
      if (old != nullptr) memcpy(old, entry, bytes);
      memcpy(entry, array.constant ? filled : array.from + i * array.entry_bytes, bytes);
    }
  }

  const HashExchanged exchange_;
  std::vector<char*> filled_;  // of an array with one number for all elements: an entry that is full of it
};

}  // namespace

template <typename T>
std::unique_ptr<Pass> HashInitial(const InitialValues& values, const HashBatch& batch, int64_t features, T* rows) {
  return InitialRowsAt(values, batch, features, rows,
                       [present = batch.present](int64_t i) { return present[i] ? i : -1; });
}

template <typename T>
std::unique_ptr<Pass> HashReset(const InitialValues& values, const HashBatch& batch, const int32_t* slots,
                                int64_t capacity, int64_t features, T* rows) {
  return InitialRowsAt(values, batch, features, rows,
                       [=](int64_t i) { return slots[i] < capacity ? int64_t{slots[i]} : -1; });
}

#define JAX_TT_INITIAL_ROWS(T)                                                                                       \
  template std::unique_ptr<Pass> HashInitial(const InitialValues&, const HashBatch&, int64_t, T*);                   \
  template std::unique_ptr<Pass> HashReset(const InitialValues&, const HashBatch&, const int32_t*, int64_t, int64_t, \
                                           T*);
JAX_TT_INITIAL_ROWS(float)
JAX_TT_INITIAL_ROWS(double)
JAX_TT_INITIAL_ROWS(bfloat16)
JAX_TT_INITIAL_ROWS(float16)
#undef JAX_TT_INITIAL_ROWS

std::unique_ptr<Pass> HashExchange(HashExchanged exchange) { return std::make_unique<Exchange>(std::move(exchange)); }

}  // namespace jax_tt
