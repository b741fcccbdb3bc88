// Which accesses of a warp come before which: the order that synchronisations of the warp, or of parts of it, make.
#pragma once

#include <cstdint>
#include <cstring>

namespace jax_tt::emulation {

inline constexpr int kWarp = 32;

// A synchronisation of all lanes only counts up.  One of some lanes keeps, for each of them, how much of every other
// lane's past it has seen (a vector clock); the next whole one makes that history needless.
class WarpOrder {
 public:
  uint32_t full() const { return full_; }
  uint32_t clock(int lane) const { return clock_[lane]; }
  // How far into the past of `other` lane `lane` has seen: accesses made at a smaller clock come before its own.
  uint32_t Seen(int lane, int other) const { return seen_[lane][other]; }

  void Reset() {
    full_ = 0;
    Forget();
  }

  void SyncAll() {
    ++full_;
    Forget();
  }

  void SyncSome(uint32_t lanes) {
    partial_ = true;
    uint32_t joined[kWarp] = {};
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      seen_[lane][lane] = ++clock_[lane];
      for (int other = 0; other < kWarp; ++other) {
        if (seen_[lane][other] > joined[other]) joined[other] = seen_[lane][other];
      }
    }
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) memcpy(seen_[__builtin_ctz(rest)], joined, sizeof(joined));
  }

 private:
  void Forget() {
    if (!partial_) return;
    partial_ = false;
    memset(clock_, 0, sizeof(clock_));
    memset(seen_, 0, sizeof(seen_));
  }

  uint32_t full_ = 0;
  bool partial_ = false;
  uint32_t clock_[kWarp] = {};
  uint32_t seen_[kWarp][kWarp] = {};
};

}  // namespace jax_tt::emulation
