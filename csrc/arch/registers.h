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

}  // namespace paged_kv
