// What tiles add up from those before them, whatever these have said so far: some their own counts, some all up to
// them.
#include <stdint.h>
#include <stdio.h>

#include <random>
#include <vector>

#include "ffi/cuda/tile_count.h"

int main() {
  using jax_tt::TileCount;
  std::mt19937 random(0);
  for (int bins : {1, 3})
    for (int tiles = 1; tiles <= 40; ++tiles)
      for (int draw = 0; draw < 200; ++draw) {
        // As often as not, none has the sum of all before it: also not the first one.
        const unsigned share = random() % 2 == 0 ? 0 : random() % 4;
        std::vector<unsigned long long> counts(static_cast<size_t>(tiles) * bins);
        unsigned long long all = 0;
        for (int tile = 0; tile < tiles; ++tile) {
          const unsigned long long own = random() % 5;
          all += own;
          counts[static_cast<size_t>(tile) * bins] =
              random() % 4 < share ? all | TileCount::kAll : own | TileCount::kOwn;
        }
        const int32_t got = TileCount::Before(counts.data(), tiles, bins);
        if (got != static_cast<int32_t>(all)) {
          printf("%d tiles: got %d; expected %llu\n", tiles, got, all);
          return 1;
        }
      }
  if (jax_tt::TileCount::Before(nullptr, 0, 1) != 0) return 1;
  puts("ok");
}
