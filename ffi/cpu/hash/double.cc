#include <string.h>

#include "ffi/cpu/hash/hash.h"

namespace jax_tt {
namespace {

// The slots of two new sets get the entries of one old set: old[half][way], with -1 for nothing.
struct Halves {
  int32_t old[2][kMaxHashWays];
};

Halves Divide(const HashDirectory& before, int64_t set) {
  const HashSets sets(2 * before.sets);
  Halves halves;
  int64_t count[2] = {0, 0};
  for (int64_t slot = set * before.ways, end = slot + before.ways; slot < end; ++slot) {
    if (before.touched[slot] <= 0) continue;
    const uint64_t key = before.WordOf(before.keys, slot);
    const auto high = static_cast<uint32_t>(key >> 32), low = static_cast<uint32_t>(key);
    const int64_t first = sets.Of(FirstHash(high, low));
    const int64_t home = first == set || first == set + before.sets ? first : sets.Of(SecondHash(high, low));
    const int half = home >= before.sets;
    halves.old[half][count[half]++] = static_cast<int32_t>(slot);
  }
  for (int half = 0; half < 2; ++half)
    for (int64_t way = count[half]; way < before.ways; ++way) halves.old[half][way] = -1;
  return halves;
}

}  // namespace

void HashDouble(const HashDirectory& before, const HashDirectory& after, const std::vector<HashGrown>& arrays,
                const Pool& pool) {
  constexpr int64_t kBlock = 64;
  Phases phases;
  phases.AddBlocks(before.sets, kBlock, [&](int64_t set, int64_t last, int) {
    for (; set < last; ++set) {
      const Halves halves = Divide(before, set);
      for (int half = 0; half < 2; ++half) {
        for (int64_t way = 0; way < before.ways; ++way) {
          const int64_t old = halves.old[half][way], slot = (set + half * before.sets) * before.ways + way;
          after.SetWordOf(after.keys, slot, old < 0 ? 0 : before.WordOf(before.keys, old));
          after.SetWordOf(after.scores, slot, old < 0 ? 0 : before.WordOf(before.scores, old));
          after.touched[slot] = old < 0 ? 0 : before.touched[old];
          for (const HashGrown& array : arrays) {
            const auto bytes = static_cast<size_t>(array.entry_bytes);
            char* const entry = array.after + slot * array.entry_bytes;
            if (old < 0)
              memset(entry, 0, bytes);
            else
              memcpy(entry, array.before + old * array.entry_bytes, bytes);
          }
        }
      }
    }
  });
  pool.Run(phases);
}

}  // namespace jax_tt
