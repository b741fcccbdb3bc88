// Native code of hash tables and tiers under sanitizers: ops on directories whose tasks run in several threads, and
// what the threads that prepare the batches of tiers call without Python's lock.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "ffi/common/hash_checks.h"
#include "ffi/cpu/hash/hash.h"
#include "ffi/cpu/kernels/find_keys.h"
#include "ffi/cpu/kernels/initial_row.h"
#include "ffi/cpu/passes.h"
#include "ffi/cpu/tiers/copy_rows.h"
#include "ffi/cpu/tiers/key_index.h"
#include "tests/cpp/stress.h"

namespace jax_tt {

const HashKernels& GetHashKernels() {
  static const HashKernels kernels{FindKeys, InitialPart};
  return kernels;
}

}  // namespace jax_tt

namespace {

using jax_tt::HashDirectory;
using jax_tt::HashPolicy;
using stress::Fail;

constexpr int64_t kBatch = 20000;  // several tasks

// A directory, and the arrays of a batch that is inserted into it.
struct Table {
  Table(int64_t sets, int64_t ways)
      : keys(static_cast<size_t>(2 * sets * ways)),
        scores(keys),
        touched(static_cast<size_t>(sets * ways)),
        rows(4 * touched.size()),
        directory(Of(sets, ways)) {}

  HashDirectory Of(int64_t sets, int64_t ways) {
    std::optional<HashDirectory> made;
    const auto size = static_cast<int64_t>(keys.size());
    if (!MakeHashDirectory(sets, ways, {{keys.data(), size}, {scores.data(), size}, {touched.data(), size / 2}}, &made)
             .ok())
      Fail("a directory was refused");
    return *made;
  }

  std::vector<uint32_t> keys, scores;
  std::vector<int32_t> touched;
  std::vector<float> rows;
  HashDirectory directory;

  std::vector<int32_t> slots = std::vector<int32_t>(kBatch), found = slots;
  std::vector<uint32_t> inserted = std::vector<uint32_t>(2 * kBatch);
  std::vector<int32_t> counts = std::vector<int32_t>(jax_tt::kHashCounts);

  bool Equals(const Table& other) const {
    return keys == other.keys && scores == other.scores && touched == other.touched && slots == other.slots &&
           inserted == other.inserted && counts == other.counts && found == other.found && rows == other.rows;
  }
};

struct Batch {
  std::vector<uint32_t> words = std::vector<uint32_t>(2 * kBatch);
  std::unique_ptr<bool[]> present{new bool[kBatch]};
};

Batch Drawn(std::mt19937_64& draw, uint64_t keys) {
  Batch batch;
  for (int64_t k = 0; k < kBatch; ++k) {
    const uint64_t number = draw() % keys;  // of which 0 is the key of empty slots
    batch.words[static_cast<size_t>(2 * k)] = static_cast<uint32_t>(number * 0x9E3779B97F4A7C15u >> 32);
    batch.words[static_cast<size_t>(2 * k + 1)] = static_cast<uint32_t>(number);
    batch.present[static_cast<size_t>(k)] = draw() % 16 > 0;
  }
  return batch;
}

void Run(const jax_tt::Pool& pool, std::unique_ptr<jax_tt::Pass> pass) {
  std::vector<std::unique_ptr<jax_tt::Pass>> passes;
  passes.push_back(std::move(pass));
  if (!RunPasses(passes, pool).ok()) Fail("an op failed");
}

// An insertion, the initial rows of what is new, and a search.
void Step(const jax_tt::Pool& pool, Table& table, const Batch& batch, int32_t now, HashPolicy policy) {
  const uint32_t epoch = 0;
  const jax_tt::HashBatch keys{batch.words.data(), batch.present.get(), kBatch};
  jax_tt::HashEntry entry{.directory = table.directory};
  entry.asked.batch = keys;
  entry.asked.now = &now;
  entry.asked.epoch = &epoch;
  entry.asked.policy = policy;
  entry.done.slots = table.slots.data();
  entry.done.keys = table.inserted.data();
  entry.done.counts = table.counts.data();
  entry.done.found = table.found.data();
  Run(pool, HashInsert(entry, pool.workers));

  const std::vector<int32_t> quantiles(jax_tt::kQuantiles, 7);
  const jax_tt::InitialValues values{quantiles.data(), {1, 2}, 0.5f, true};
  const jax_tt::HashBatch fresh{table.inserted.data(), nullptr, kBatch};
  Run(pool, jax_tt::HashReset(values, fresh, table.slots.data(), table.directory.capacity(), 4, table.rows.data()));

  std::vector<int32_t> slots(kBatch);
  jax_tt::HashSearch search{.directory = table.directory};
  search.batch = keys;
  search.slots = slots.data();
  Run(pool, HashFind(search));
  if (slots != table.found) Fail("a search found other slots than the insertion");
}

// Batches in several threads, and the same ones in one.
void RunTables(stress::Threads& threads, uint64_t seed, HashPolicy policy) {
  const jax_tt::Pool pool{4, [&](std::function<void()> closure) { threads.Schedule(std::move(closure)); }};
  const jax_tt::Pool alone{1, [](const std::function<void()>&) {}};
  std::mt19937_64 draw(seed);
  Table table(500, seed % 2 == 0 ? 8 : 3), other(500, seed % 2 == 0 ? 8 : 3);
  for (int32_t now = 1; now <= 4; ++now) {
    const Batch batch = Drawn(draw, now % 2 == 0 ? 1000 : 6000);
    Step(pool, table, batch, now, policy);
    Step(alone, other, batch, now, policy);
    if (!table.Equals(other)) Fail("an insertion depends on the number of threads");
  }
}

// Random changes of an index, and a map that has the same.
class Changes {
 public:
  explicit Changes(uint64_t seed) : draw_(seed) {}

  void Run() {
    std::vector<uint64_t> keys(700);
    std::vector<int64_t> numbers(keys.size()), before(keys.size());
    for (uint64_t& key : keys) key = draw_() % 3 == 0 ? draw_() % 100 : draw_() % 20000 << 40;
    for (int64_t& number : numbers) number = static_cast<int64_t>(draw_() >> 1);
    const auto n = static_cast<int64_t>(keys.size());
    const bool erase = draw_() % 3 == 0;
    erase ? index_.Erase(keys.data(), n, before.data()) : index_.Set(keys.data(), numbers.data(), n, before.data());
    for (size_t k = 0; k < keys.size(); ++k) {
      const auto old = map_.find(keys[k]);
      if (before[k] != (old == map_.end() ? -1 : old->second)) Fail("another number was there before");
      erase ? static_cast<void>(map_.erase(keys[k])) : static_cast<void>(map_[keys[k]] = numbers[k]);
    }
    if (index_.size() != static_cast<int64_t>(map_.size())) Fail("the index has another size");
    Find(keys);
  }

  void Find(const std::vector<uint64_t>& keys) const {
    std::vector<int64_t> numbers(keys.size());
    index_.Find(keys.data(), static_cast<int64_t>(keys.size()), numbers.data());
    for (size_t k = 0; k < keys.size(); ++k) {
      const auto there = map_.find(keys[k]);
      if (numbers[k] != (there == map_.end() ? -1 : there->second)) Fail("a key has another number");
    }
  }

 private:
  std::mt19937_64 draw_;
  jax_tt::KeyIndex index_;
  std::unordered_map<uint64_t, int64_t> map_;
};

// As in the preparation of batches: one thread alone uses an index and a directory; another one and the thread of
// the steps share an index under a lock, and copy rows.
void RunTiers() {
  std::mutex stores;
  Changes shared(1);
  const auto with_stores = [&] {
    std::vector<int64_t> from(64 * 1000), to(from.size());
    std::vector<uint64_t> sources(1000), targets(1000);
    for (size_t k = 0; k < 1000; ++k) {
      from[64 * k] = static_cast<int64_t>(k);
      sources[k] = reinterpret_cast<uint64_t>(&from[64 * k]);
      targets[k] = reinterpret_cast<uint64_t>(&to[64 * (999 - k)]);
    }
    for (int round = 0; round < 60; ++round) {
      const std::lock_guard<std::mutex> lock(stores);
      shared.Run();
      jax_tt::CopyRows(sources.data(), targets.data(), 1000, 512);
    }
    if (to[0] != 999) Fail("a row was not copied");
  };
  std::thread places([] {
    const jax_tt::Pool alone{1, [](const std::function<void()>&) {}};
    std::mt19937_64 draw(3);
    Changes own(2);
    Table table(300, 8);
    for (int32_t now = 1; now <= 12; ++now) {
      for (int round = 0; round < 5; ++round) own.Run();
      Step(alone, table, Drawn(draw, 4000), now, HashPolicy::kLru);
    }
  });
  std::thread fetches(with_stores);
  with_stores();
  fetches.join();
  places.join();
  // Nothing changes during searches.
  const std::vector<uint64_t> keys(5000, uint64_t{1} << 40);
  std::thread reads([&] { shared.Find(keys); });
  shared.Find(keys);
  reads.join();
}

}  // namespace

int main() {
  stress::Threads threads(3);
  for (uint64_t seed = 0; seed < 5; ++seed) RunTables(threads, seed, static_cast<HashPolicy>(seed));
  std::vector<std::thread> callers;
  for (uint64_t seed = 5; seed < 7; ++seed)
    callers.emplace_back([&threads, seed] { RunTables(threads, seed, HashPolicy::kLfu); });
  RunTiers();
  for (std::thread& caller : callers) caller.join();
  std::puts("ok");
  return 0;
}
