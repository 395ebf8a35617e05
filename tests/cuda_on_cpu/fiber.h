// A stack of its own and a way onto it: what a CUDA thread runs on. A switch costs a few nanoseconds.
#pragma once

#include <cstddef>

namespace cuda_on_cpu {

inline constexpr size_t kStackBytes = 256 << 10;  // reserved; a page is committed when it is first touched

struct Context {
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's, while the context does not run
  const void* stack = nullptr;
  size_t stack_bytes = 0;
};

// Makes `context` start in entry(), which never returns, on the stack given.
void prepare(Context& context, char* stack, size_t stack_bytes, void (*entry)());

// Goes on in `to`; returns when someone switches back to `from`. A context that ends passes ends = true.
void switch_context(Context& from, Context& to, bool ends = false);

// To be called first in a context's entry(); `from` is the context that was left.
void entered();

}  // namespace cuda_on_cpu
