// The notices of all tables, and the thread that turns them into reports.
#pragma once

#include <stdint.h>

#include "ffi/core/lookups.h"

namespace jax_tt {

// Allocates the notices, by a device of this process, and starts to look at them, a few times a second; once per
// process.  A kernel cannot call the
// host without making it wait, and a handler is not called again where the runtime replays what it has recorded.
void WatchNotices(int device);

// Reports what kernels have left so far, without waiting for the next look.
void ReportNotices();

// Gives lookups with Bounds::kWarn the notice of their table.  It stays null where nobody watches, or where there are
// more tables than notices.
void FindNotice(int64_t num_embeddings, Lookups* lookups);

}  // namespace jax_tt
