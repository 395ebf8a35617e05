// What only inline assembly can tell a compiler for x86: where a value is to stay.
#pragma once

namespace paged_kv {

// v, in a vector register. Short of registers, GCC would rather read it anew for each instruction that takes it, and
// then loads are what there are too few of.
template <class V>
inline __attribute__((always_inline)) V keep_in_register(V v) {
  asm("" : "+x"(v));
  return v;
}

// An integer or a pointer, all that follows from it being found anew from here on. GCC would find before a loop what
// the loop could find beside its work, and short of registers for it keep it in vector registers, from which it comes
// back at one a cycle.
template <class T>
inline __attribute__((always_inline)) T forget(T v) {
  asm volatile("" : "+r"(v));
  return v;
}

}  // namespace paged_kv
