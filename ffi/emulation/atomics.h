// Atomic operations of the emulator.  Threads take turns, so plain arithmetic is atomic; on shared memory the
// history learns that the access was.
#pragma once

#include "ffi/emulation/shared_memory.h"

// `expression` is the new value, of `old` and `value`.
#define JAX_TT_ATOMIC(name, T, expression) \
  inline T name(T* p, T value) {           \
    const T old = *p;                      \
    *p = (expression);                     \
    return old;                            \
  }                                        \
  inline T name(jax_tt::Shared<T> p, T value) { return name(p.Atomic(), value); }
#define JAX_TT_INTEGER_ATOMICS(T)                        \
  JAX_TT_ATOMIC(atomicAdd, T, old + value)               \
  JAX_TT_ATOMIC(atomicMax, T, old < value ? value : old) \
  JAX_TT_ATOMIC(atomicMin, T, value < old ? value : old) \
  JAX_TT_ATOMIC(atomicOr, T, old | value)                \
  JAX_TT_ATOMIC(atomicAnd, T, old& value)                \
  JAX_TT_ATOMIC(atomicXor, T, old ^ value)               \
  JAX_TT_ATOMIC(atomicExch, T, value)                    \
  inline T atomicCAS(T* p, T expected, T value) {        \
    const T old = *p;                                    \
    if (old == expected) *p = value;                     \
    return old;                                          \
  }                                                      \
  inline T atomicCAS(jax_tt::Shared<T> p, T expected, T value) { return atomicCAS(p.Atomic(), expected, value); }

JAX_TT_INTEGER_ATOMICS(int)
JAX_TT_INTEGER_ATOMICS(unsigned)
JAX_TT_INTEGER_ATOMICS(unsigned long long)
JAX_TT_ATOMIC(atomicAdd, float, old + value)
JAX_TT_ATOMIC(atomicExch, float, value)

#undef JAX_TT_INTEGER_ATOMICS
#undef JAX_TT_ATOMIC
