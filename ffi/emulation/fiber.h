// Stacks that take turns on one OS thread: what the emulator runs the threads of a block on.
#pragma once

#include <cstddef>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#define JAX_TT_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define JAX_TT_ADDRESS_SANITIZER 1
#endif
#endif

// The slow way, for processors that fiber.cc has no switch for.
#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(JAX_TT_UCONTEXT)
#define JAX_TT_UCONTEXT 1
#endif
#if defined(JAX_TT_UCONTEXT)
#include <ucontext.h>
#endif

namespace jax_tt::emulation {

// Where a suspended stack goes on.  The default one stands for the stack that calls Switch first.
class Context {
 public:
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Suspends the calling stack in `from` and goes on in `to`; returns once something switches back to `from`.
  friend void Switch(Context& from, Context& to);

 protected:
#if defined(JAX_TT_UCONTEXT)
  ucontext_t machine_;
#else
  void* stack_pointer_ = nullptr;  // the registers that a call preserves lie on the stack itself
#endif
  // The address sanitizer is told of every switch, or it takes the new stack for an overflow of the old one.
  const void* stack_bottom_ = nullptr;
  size_t stack_size_ = 0;
  void* fake_stack_ = nullptr;

  void Arrive(Context& from);
};

// A stack of its own below a guard page, so that an overflow faults instead of changing another fiber.
class Fiber : public Context {
 public:
  // `entry` must not return.  `index` spreads the tops of the stacks over the sets of the processor's caches.
  Fiber(void (*entry)(), int index);
  ~Fiber();

  // Forgets whatever the fiber was doing: the next switch to it calls `entry` again.
  void Reset();

 private:
  static void Start();

  void (*entry_)();
  void* mapping_;
  size_t colour_;
};

void Switch(Context& from, Context& to);

}  // namespace jax_tt::emulation
