#include "ffi/common/reports.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>

namespace jax_tt {
namespace {

struct Mailbox {
  std::timed_mutex mutex;
  std::vector<Report> reports;
  bool (*wake)() = nullptr;
  bool awake = false;
};

// Never destroyed: threads of XLA run until the process has gone.
Mailbox& TheMailbox() {
  static Mailbox* const mailbox = new Mailbox;
  return *mailbox;
}

// Calls body(mailbox) alone.  A process forked while another thread was in here inherits a mutex that nobody will
// unlock: such a process goes without reports instead of waiting for ever.
template <typename F>
void Locked(F&& body) noexcept {
  try {
    Mailbox& mailbox = TheMailbox();
    const std::unique_lock<std::timed_mutex> lock(mailbox.mutex, std::chrono::milliseconds(200));
    if (lock.owns_lock()) body(mailbox);
  } catch (...) {  // no memory for a report: the ids are in the layer's count all the same
  }
}

}  // namespace

void Post(Report report) noexcept {
  Locked([&](Mailbox& mailbox) {
    if (mailbox.wake == nullptr) return;
    const bool known = std::any_of(mailbox.reports.begin(), mailbox.reports.end(), [&](const Report& other) {
      return other.table == report.table && other.num_embeddings == report.num_embeddings &&
             other.message == report.message;
    });
    if (!known) mailbox.reports.push_back(std::move(report));
    if (!mailbox.awake) mailbox.awake = mailbox.wake();
  });
}

std::vector<Report> TakeReports() noexcept {
  std::vector<Report> taken;
  Locked([&](Mailbox& mailbox) {
    mailbox.awake = false;
    taken.swap(mailbox.reports);
  });
  return taken;
}

void SetWake(bool (*wake)()) noexcept {
  Locked([&](Mailbox& mailbox) {
    mailbox.wake = wake;
    mailbox.awake = false;
    mailbox.reports.clear();
  });
}

}  // namespace jax_tt
