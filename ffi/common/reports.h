// Ids out of range that Bounds::kWarn found, and keys without a row, on their way to a Python warning.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

namespace jax_tt {

// What one call found.
struct Report {
  std::string table = {};
  int64_t num_embeddings = 0;
  int64_t count = 0;     // of these ids
  std::string id = {};   // the first of them, as the caller wrote it
  int64_t position = 0;  // where that stood
  // Of keys without a row, what to say, with {count} in it; then only the count counts beside it.  Of offsets of bags,
  // what is wrong with them; then the count is 0.
  std::string message = {};
};

// Keeps a report until it is taken, unless there is one of this table already.  For any thread: it never throws, and
// waits for no more than a moment.
void Post(Report report) noexcept;

std::vector<Report> TakeReports() noexcept;

// From here on `wake` is called, by the thread that posts, when there are reports to take where there were none; it
// returns whether they will be taken.  Null: nobody listens, and what is posted is dropped.
void SetWake(bool (*wake)()) noexcept;

}  // namespace jax_tt
