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

// p, what it points to being read anew from here on. GCC would read what a loop takes from memory before the loop, and
// short of registers for it keep it in vector registers, from which it comes back at one a cycle.
template <class T>
inline __attribute__((always_inline)) T* forget(T* p) {
  asm("" : "+r"(p));
  return p;
}

}  // namespace paged_kv
