// What an op of hash tables does to one of the tables of a call.  The pointers are memory of the device.
#pragma once

#include <stdint.h>

#include <string_view>
#include <vector>

#include "ffi/core/hash.h"

namespace jax_tt {

// What is said of keys without a row, and how.
struct HashCheck {
  enum Mode : int64_t { kIgnore = 0, kWarn = 1, kError = 2 };
  static constexpr const char* kNames[] = {"ignore", "warn", "error"};

  Mode mode = kIgnore;
  std::string_view message;  // with {count} in it
};

// A search in one table.  A key that is not there has the slot `absent`, a position that is not present -1.
struct HashSearch {
  HashDirectory directory;
  HashBatch batch = {};
  // [n], or null: slots where keys were, which are taken if they still have the key.  A key with a negative one is not
  // there, and does not count in `check`.
  const int32_t* guess = nullptr;
  int32_t absent = -1;
  int32_t* slots = nullptr;  // [n]
  HashCheck check = {};      // of the keys that are not there
};

// An insertion into one table.
struct HashEntry {
  HashDirectory directory;
  HashRequests asked = {};
  HashInsertion done = {};
  HashCheck check = {};  // of the keys that are refused
};

// Numbers of batches in a directory: all entries of last batches, or one word of scores [sets, 2, ways].
struct HashNumbers {
  uint32_t* entries = nullptr;
  int64_t count = 0, ways = 0;
  int64_t word = -1;  // none of last batches

  // Reduces number i, to 1 at least if it is not 0.
  JAX_TT_INLINE void SetBack(int64_t i, uint32_t back) const {
    uint32_t* const number = entries + (word < 0 ? i : (i / ways * 2 + word) * ways + i % ways);
    *number = *number > back ? *number - back : *number > 0;
  }
};

// The numbers of batches of one table, which are set back to end at `kept` once the clock has come to `last`.
struct HashClock {
  const int32_t* clock = nullptr;
  std::vector<HashNumbers> numbers;
  int64_t last = 0, kept = 0;
};

// An exchange in the arrays of one table.
struct HashExchanged {
  std::vector<HashArray> arrays;
  const int32_t* slots = nullptr;  // [n]
  int64_t n = 0, capacity = 0;
};

}  // namespace jax_tt
