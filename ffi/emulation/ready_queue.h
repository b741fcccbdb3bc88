// The threads of a block that can run, and the seeded choice of which runs next.
#pragma once

#include <cstdint>
#include <utility>

namespace jax_tt::emulation {

inline constexpr int kMaxThreads = 1024;

// splitmix64: any seed gives a good sequence, and a block costs nothing to seed.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(((Next() >> 32) * n) >> 32); }

 private:
  uint64_t state_;
};

// A ring.  Threads that wake together go in front of the others or behind them: in front, one warp runs ahead as far
// as it can; behind, all advance together.  With a seed, each time and the order within is a matter of chance.
class ReadyQueue {
 public:
  void Reset(uint64_t seed) {
    seeded_ = seed != 0;
    random_ = Random(seed);
    head_ = count_ = 0;
  }

  // Threads that have become able to run, all at once.
  void Add(const uint16_t* threads, int n) {
    const bool front = !seeded_ || (random_.Next() & 1) != 0;
    if (front) head_ -= static_cast<uint32_t>(n);
    const uint32_t start = front ? head_ : head_ + count_;
    for (int i = 0; i < n; ++i) ring_[(start + i) % kMaxThreads] = threads[i];
    count_ += static_cast<uint32_t>(n);
    if (!seeded_) return;
    for (uint32_t i = static_cast<uint32_t>(n) - 1; i > 0; --i)
      std::swap(ring_[(start + i) % kMaxThreads], ring_[(start + random_.Below(i + 1)) % kMaxThreads]);
  }

  bool empty() const { return count_ == 0; }
  int Take() {
    --count_;
    return ring_[head_++ % kMaxThreads];
  }

 private:
  uint16_t ring_[kMaxThreads];
  uint32_t head_ = 0, count_ = 0;
  Random random_{0};
  bool seeded_ = false;
};

}  // namespace jax_tt::emulation
