// tsl::robin_map from 64-bit keys to rows behind a C interface, as the rival of the directory of a hash table.
#include <stdint.h>
#include <tsl/robin_map.h>

namespace {

// The finaliser of murmur3; the map keeps the low bits of a hash.
struct Mix {
  size_t operator()(uint64_t key) const {
    key = (key ^ (key >> 33)) * 0xff51afd7ed558ccdull;
    key = (key ^ (key >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return key ^ (key >> 33);
  }
};
using Map = tsl::robin_map<uint64_t, int32_t, Mix>;

}  // namespace

extern "C" {

// The number of a key is its position.
void* make_map(const uint64_t* keys, int64_t n) {
  Map* map = new Map;
  for (int64_t i = 0; i < n; ++i) map->emplace(keys[i], static_cast<int32_t>(i));
  return map;
}

void free_map(void* map) { delete static_cast<Map*>(map); }

void find(const void* map, const uint64_t* keys, int64_t n, int32_t* rows) {
  const Map& of_keys = *static_cast<const Map*>(map);
#pragma omp parallel for num_threads(2)
  for (int64_t i = 0; i < n; ++i) {
    const auto found = of_keys.find(keys[i]);
    rows[i] = found == of_keys.end() ? -1 : found->second;
  }
}
}
