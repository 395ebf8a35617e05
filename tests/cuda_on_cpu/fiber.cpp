#include "fiber.h"

#include <sanitizer/asan_interface.h>

#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_on_cpu {
namespace {

// AddressSanitizer must be told of each switch, or it takes the other stack for a wild pointer.
[[maybe_unused]] thread_local Context* left = nullptr;

void before_switch([[maybe_unused]] Context& from, [[maybe_unused]] Context& to, [[maybe_unused]] bool ends) {
#if defined(__SANITIZE_ADDRESS__)
  left = &from;
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
}

void after_switch([[maybe_unused]] Context* self) {
#if defined(__SANITIZE_ADDRESS__)
  // The bounds of an OS thread's own stack are learnt when it is first left.
  __sanitizer_finish_switch_fiber(self == nullptr ? nullptr : self->fake_stack, &left->stack, &left->stack_bytes);
#endif
}

}  // namespace

#if defined(__x86_64__)

// Saves the registers that a call preserves, exchanges the stack pointer, restores them.
extern "C" void cuda_on_cpu_exchange(void** save, void* load);
asm(R"(
  .text
  .hidden cuda_on_cpu_exchange
  .globl cuda_on_cpu_exchange
  .type cuda_on_cpu_exchange, @function
cuda_on_cpu_exchange:
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
  .size cuda_on_cpu_exchange, .-cuda_on_cpu_exchange
)");

void prepare(Context& context, char* stack, size_t stack_bytes, void (*entry)()) {
  ASAN_UNPOISON_MEMORY_REGION(stack, stack_bytes);  // what ran there before never returned
  constexpr int kSavedRegisters = 6;
  // Above the saved registers stand the address that `ret` goes to and a return address that entry() never uses; the
  // stack pointer is then where a call would have left it.
  auto* top = reinterpret_cast<uintptr_t*>(stack + stack_bytes);
  *--top = 0;
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = 0;
  context = {top, nullptr, stack, stack_bytes};
}

void switch_context(Context& from, Context& to, bool ends) {
  before_switch(from, to, ends);
  cuda_on_cpu_exchange(&from.stack_pointer, to.stack_pointer);
  after_switch(&from);
}

#else  // any other processor, slower: swapcontext makes a system call

void prepare(Context& context, char* stack, size_t stack_bytes, void (*entry)()) {
  ASAN_UNPOISON_MEMORY_REGION(stack, stack_bytes);  // what ran there before never returned
  auto* other = static_cast<ucontext_t*>(context.stack_pointer);
  if (other == nullptr) other = new ucontext_t;  // kept with the context, which is used again
  getcontext(other);
  other->uc_stack = {stack, 0, stack_bytes};
  other->uc_link = nullptr;
  makecontext(other, entry, 0);
  context = {other, nullptr, stack, stack_bytes};
}

void switch_context(Context& from, Context& to, bool ends) {
  before_switch(from, to, ends);
  if (from.stack_pointer == nullptr) from.stack_pointer = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.stack_pointer), static_cast<ucontext_t*>(to.stack_pointer));
  after_switch(&from);
}

#endif

void entered() { after_switch(nullptr); }

}  // namespace cuda_on_cpu
