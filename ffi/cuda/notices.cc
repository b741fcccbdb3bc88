#include "ffi/cuda/notices.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ffi/common/reports.h"
#include "ffi/cuda/notice.h"
#include "ffi/cuda/simt.h"

namespace jax_tt {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(50);

struct Watched {
  std::string table;
  int64_t num_embeddings;
  bool digits;
  bool reported = false;
};

struct Watch {
  std::mutex mutex;
  Notice* notices = nullptr;    // [kMaxNotices]
  std::vector<Watched> tables;  // the k-th has the k-th notice
};

// Never destroyed: kernels and the thread that looks run until the process has gone.
Watch& TheWatch() {
  static Watch* const watch = new Watch;
  return *watch;
}

// In a thread of its own, whose device this chooses: memory of the host is allocated by a device, and the first one may
// be that of another process.
Notice* AllocateNotices(int device) {
#if defined(JAX_TT_EMULATION)
  (void)device;
  return new Notice[kMaxNotices];
#else
  void* memory = nullptr;
  if (cudaSetDevice(device) != cudaSuccess ||
      cudaHostAlloc(&memory, kMaxNotices * sizeof(Notice), cudaHostAllocMapped | cudaHostAllocPortable) !=
          cudaSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return new (memory) Notice[kMaxNotices];
#endif
}

// The id as the caller wrote it.  JoinDigits has two numbers for digits that are no row.
std::string IdText(const Watched& table, int64_t id) {
  if (table.digits && id < 0) return "a negative id";
  if (table.digits && id == std::numeric_limits<int64_t>::max())
    return "an id beyond " + std::to_string(table.num_embeddings);
  return "id " + std::to_string(id);
}

// The caller holds the mutex.
void PostWritten(Watch& watch) {
  if (watch.notices == nullptr) return;
  for (size_t k = 0; k < watch.tables.size(); ++k) {
    Watched& table = watch.tables[k];
    Notice& notice = watch.notices[k];
    if (table.reported || std::atomic_ref(notice.state).load(std::memory_order_acquire) != Notice::kWritten) continue;
    table.reported = true;
    Post({.table = table.table,
          .num_embeddings = table.num_embeddings,
          .count = 0,
          .id = IdText(table, notice.id),
          .position = notice.position});
  }
}

}  // namespace

void WatchNotices(int device) {
  Watch& watch = TheWatch();
  const std::lock_guard<std::mutex> lock(watch.mutex);
  if (watch.notices != nullptr) return;
  std::thread([&] { watch.notices = AllocateNotices(device); }).join();
  if (watch.notices == nullptr) return;
  std::thread([&watch] {
    for (;; std::this_thread::sleep_for(kInterval)) {
      const std::lock_guard<std::mutex> lock(watch.mutex);
      PostWritten(watch);
    }
  }).detach();
}

void ReportNotices() {
  Watch& watch = TheWatch();
  // A forked process may have inherited the mutex locked, by a thread that it has not got.
  const std::unique_lock<std::mutex> lock(watch.mutex, std::try_to_lock);
  if (lock.owns_lock()) PostWritten(watch);
}

void FindNotice(int64_t num_embeddings, Lookups* lookups) {
  if (lookups->bounds != Bounds::kWarn) return;
  Watch& watch = TheWatch();
  const bool digits = lookups->type == IdType::kDigits;
  const std::lock_guard<std::mutex> lock(watch.mutex);
  if (watch.notices == nullptr) return;
  const auto same = [&](const Watched& other) {
    return other.num_embeddings == num_embeddings && other.digits == digits && other.table == lookups->table;
  };
  auto found = std::find_if(watch.tables.begin(), watch.tables.end(), same);
  if (found == watch.tables.end()) {
    if (watch.tables.size() == static_cast<size_t>(kMaxNotices)) return;
    found = watch.tables.insert(found, {std::string(lookups->table), num_embeddings, digits});
  }
  if (!found->reported) lookups->notice = watch.notices + (found - watch.tables.begin());
}

}  // namespace jax_tt
