#include "ffi/emulation/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>

#include "ffi/emulation/fast_tls.h"

#if defined(JAX_TT_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// jax_tt_switch_stack(void** save, void* load): saves the registers that a call preserves, leaves the stack pointer
// in *save and takes everything up again from `load`.  Saving nothing else is what makes a switch cost nanoseconds.
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl jax_tt_switch_stack
.hidden jax_tt_switch_stack
.type jax_tt_switch_stack, @function
jax_tt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size jax_tt_switch_stack, .-jax_tt_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.globl jax_tt_switch_stack
.hidden jax_tt_switch_stack
.type jax_tt_switch_stack, %function
jax_tt_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size jax_tt_switch_stack, .-jax_tt_switch_stack
)");
#endif

extern "C" void jax_tt_switch_stack(void** save, void* load);

namespace jax_tt::emulation {
namespace {

constexpr size_t kPage = 1 << 16;  // at least the page size of every supported machine
#if defined(JAX_TT_ADDRESS_SANITIZER)
constexpr size_t kStack = 1 << 18;  // its frames hold redzones
#else
constexpr size_t kStack = 1 << 17;  // its frames may hold 32 KiB of parameters twice
#endif

constinit thread_local Context* suspended JAX_TT_FAST_TLS = nullptr;  // the stack that the switch under way leaves
constinit thread_local Context* entered JAX_TT_FAST_TLS = nullptr;    // the stack that it goes on with

}  // namespace

// First thing on the new stack: completes the switch for the address sanitizer.
void Context::Arrive([[maybe_unused]] Context& from) {
#if defined(JAX_TT_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(fake_stack_, &from.stack_bottom_, &from.stack_size_);
#endif
}

void Switch(Context& from, Context& to) {
  suspended = &from;
  entered = &to;
#if defined(JAX_TT_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(&from.fake_stack_, to.stack_bottom_, to.stack_size_);
#endif
#if defined(JAX_TT_UCONTEXT)
  swapcontext(&from.machine_, &to.machine_);
#else
  jax_tt_switch_stack(&from.stack_pointer_, to.stack_pointer_);
#endif
  from.Arrive(*suspended);
}

void Fiber::Start() {
  Fiber* const self = static_cast<Fiber*>(entered);
  self->Arrive(*suspended);
  self->entry_();
  __builtin_trap();
}

Fiber::Fiber(void (*entry)(), int index) : entry_(entry), colour_(static_cast<size_t>(index) * 320 % 4096) {
  mapping_ = mmap(nullptr, kPage + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  mprotect(mapping_, kPage, PROT_NONE);
  stack_bottom_ = static_cast<char*>(mapping_) + kPage;
  stack_size_ = kStack;
  Reset();
}

Fiber::~Fiber() {
#if defined(JAX_TT_ADDRESS_SANITIZER)
  __asan_unpoison_memory_region(stack_bottom_, stack_size_);  // for whatever is mapped here next
#endif
  munmap(mapping_, kPage + kStack);
}

void Fiber::Reset() {
  fake_stack_ = nullptr;
#if defined(JAX_TT_ADDRESS_SANITIZER)
  __asan_unpoison_memory_region(stack_bottom_, stack_size_);
#endif
#if defined(JAX_TT_UCONTEXT)
  getcontext(&machine_);
  machine_.uc_stack.ss_sp = const_cast<void*>(stack_bottom_);
  machine_.uc_stack.ss_size = stack_size_ - colour_;
  machine_.uc_link = nullptr;
  makecontext(&machine_, &Fiber::Start, 0);
#else
  char* const top = static_cast<char*>(const_cast<void*>(stack_bottom_)) + stack_size_ - colour_;
  void (*const start)() = &Fiber::Start;
#if defined(__x86_64__)
  // Six registers, the address to go to, and a null return address, which is where a backtrace ends.
  char* const frame = top - 16 - 6 * 8;
  memset(frame, 0, 16 + 6 * 8);
  memcpy(frame + 6 * 8, &start, sizeof(start));
#else
  char* const frame = top - 160;
  memset(frame, 0, 160);
  memcpy(frame + 88, &start, sizeof(start));  // x30
#endif
  stack_pointer_ = frame;
#endif
}

}  // namespace jax_tt::emulation
