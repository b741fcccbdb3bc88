// Quotients by Divider against the processor's own division, where rounding could go wrong.
#include <stdint.h>
#include <stdio.h>

#include <random>
#include <vector>

#include "ffi/core/divider.h"

int main() {
  constexpr uint64_t kWord = uint64_t{1} << 32;
  std::mt19937_64 random(0);
  std::vector<uint64_t> divisors;
  for (uint64_t p = 1; p <= 3000; ++p) divisors.push_back(p);
  for (int bit = 12; bit < 64; ++bit)
    for (uint64_t p : {(uint64_t{1} << bit) - 1, uint64_t{1} << bit, (uint64_t{1} << bit) + 1}) divisors.push_back(p);
  for (int i = 0; i < 3000; ++i) divisors.push_back(random() >> random() % 60 | 1);
  for (uint64_t p : divisors) {
    const jax_tt::Divider divider(p);
    const auto check = [&](uint64_t dividend) {
      if (divider.Quotient(dividend) == dividend / p) return true;
      printf("%llu / %llu is not %llu\n", static_cast<unsigned long long>(dividend), static_cast<unsigned long long>(p),
             static_cast<unsigned long long>(divider.Quotient(dividend)));
      return false;
    };
    for (uint64_t near : {uint64_t{0}, p, kWord, kWord / p * p, (kWord - 1) / p * p, UINT64_MAX / p * p})
      for (uint64_t step : {UINT64_MAX, uint64_t{0}, uint64_t{1}})  // one less, the number itself, one more
        if (!check(near + step)) return 1;
    for (int i = 0; i < 200; ++i) {
      const uint64_t any = random() >> random() % 63;
      if (!check(any) || !check((any & (kWord - 1)) / p * p) || !check((any & (kWord - 1)) / p * p - 1)) return 1;
    }
  }
  puts("ok");
}
