// CUDA's intrinsic functions for the emulator: barriers, warp collectives, bit tricks and the arithmetic of devices.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#include "ffi/emulation/scheduler.h"

// The last two arguments, never given, are the place of the call: messages name it, and barriers compare it.
#define JAX_TT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(JAX_TT_SITE) {
  jax_tt::emulation::BlockBarrier(jax_tt::emulation::BarrierKind::kPlain, 0, file, line);
}
inline int __syncthreads_count(int predicate, JAX_TT_SITE) {
  return jax_tt::emulation::BlockBarrier(jax_tt::emulation::BarrierKind::kCount, predicate, file, line);
}
inline int __syncthreads_and(int predicate, JAX_TT_SITE) {
  return jax_tt::emulation::BlockBarrier(jax_tt::emulation::BarrierKind::kAnd, predicate, file, line);
}
inline int __syncthreads_or(int predicate, JAX_TT_SITE) {
  return jax_tt::emulation::BlockBarrier(jax_tt::emulation::BarrierKind::kOr, predicate, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, JAX_TT_SITE) {
  jax_tt::emulation::WarpCollective(jax_tt::emulation::CollectiveKind::kSync, mask, 0, 0, 32, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, JAX_TT_SITE) {
  return static_cast<unsigned>(jax_tt::emulation::WarpCollective(jax_tt::emulation::CollectiveKind::kBallot, mask,
                                                                 predicate != 0, 0, 32, file, line));
}
inline int __any_sync(unsigned mask, int predicate, JAX_TT_SITE) {
  return static_cast<int>(jax_tt::emulation::WarpCollective(jax_tt::emulation::CollectiveKind::kAny, mask,
                                                            predicate != 0, 0, 32, file, line));
}
inline int __all_sync(unsigned mask, int predicate, JAX_TT_SITE) {
  return static_cast<int>(jax_tt::emulation::WarpCollective(jax_tt::emulation::CollectiveKind::kAll, mask,
                                                            predicate != 0, 0, 32, file, line));
}

namespace jax_tt::emulation {

template <typename T>
uint64_t ToLane(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
T FromLane(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T>
T ShuffleLanes(CollectiveKind kind, unsigned mask, T value, unsigned argument, int width, const char* file, int line) {
  return FromLane<T>(WarpCollective(kind, mask, ToLane(value), argument, width, file, line));
}

}  // namespace jax_tt::emulation

// Shuffles and matches for exactly the types that CUDA has them for.
#define JAX_TT_FOR_LANE_TYPE(T)                                                                                        \
  inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, JAX_TT_SITE) {                                \
    return jax_tt::emulation::ShuffleLanes(jax_tt::emulation::CollectiveKind::kShuffle, mask, value,                   \
                                           static_cast<unsigned>(lane), width, file, line);                            \
  }                                                                                                                    \
  inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, JAX_TT_SITE) {                       \
    return jax_tt::emulation::ShuffleLanes(jax_tt::emulation::CollectiveKind::kShuffleUp, mask, value, delta, width,   \
                                           file, line);                                                                \
  }                                                                                                                    \
  inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, JAX_TT_SITE) {                     \
    return jax_tt::emulation::ShuffleLanes(jax_tt::emulation::CollectiveKind::kShuffleDown, mask, value, delta, width, \
                                           file, line);                                                                \
  }                                                                                                                    \
  inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, JAX_TT_SITE) {                       \
    return jax_tt::emulation::ShuffleLanes(jax_tt::emulation::CollectiveKind::kShuffleXor, mask, value,                \
                                           static_cast<unsigned>(lane_mask), width, file, line);                       \
  }                                                                                                                    \
  inline unsigned __match_any_sync(unsigned mask, T value, JAX_TT_SITE) {                                              \
    return static_cast<unsigned>(jax_tt::emulation::WarpCollective(                                                    \
        jax_tt::emulation::CollectiveKind::kMatchAny, mask, jax_tt::emulation::ToLane(value), 0, 32, file, line));     \
  }
JAX_TT_FOR_LANE_TYPE(int)
JAX_TT_FOR_LANE_TYPE(unsigned)
JAX_TT_FOR_LANE_TYPE(long)
JAX_TT_FOR_LANE_TYPE(unsigned long)
JAX_TT_FOR_LANE_TYPE(long long)
JAX_TT_FOR_LANE_TYPE(unsigned long long)
JAX_TT_FOR_LANE_TYPE(float)
JAX_TT_FOR_LANE_TYPE(double)
#undef JAX_TT_FOR_LANE_TYPE
#undef JAX_TT_SITE

// Blocks and threads take turns on one processor: memory is always up to date.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <typename T>
T __ldg(const T* p) {
  return *p;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline unsigned __brev(unsigned x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

inline int __float_as_int(float x) { return jax_tt::emulation::FromLane<int>(jax_tt::emulation::ToLane(x)); }
inline unsigned __float_as_uint(float x) { return jax_tt::emulation::FromLane<unsigned>(jax_tt::emulation::ToLane(x)); }
inline float __int_as_float(int x) { return jax_tt::emulation::FromLane<float>(jax_tt::emulation::ToLane(x)); }
inline float __uint_as_float(unsigned x) { return jax_tt::emulation::FromLane<float>(jax_tt::emulation::ToLane(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

#define JAX_TT_FOR_ORDERED_TYPE(T)                 \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
JAX_TT_FOR_ORDERED_TYPE(int)
JAX_TT_FOR_ORDERED_TYPE(unsigned)
JAX_TT_FOR_ORDERED_TYPE(long)
JAX_TT_FOR_ORDERED_TYPE(unsigned long)
JAX_TT_FOR_ORDERED_TYPE(long long)
JAX_TT_FOR_ORDERED_TYPE(unsigned long long)
#undef JAX_TT_FOR_ORDERED_TYPE
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
