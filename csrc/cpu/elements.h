// Elements without arithmetic: simd.h turns them into floats.
#pragma once

#include <cstdint>

#include "element_types.h"

namespace paged_kv::cpu {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The C++ type of a dtype's elements, e.g. Element<tag()> in the lambda of a dispatch function.
template <DType kType>
using Element = ElementOf<kType, Float16, BFloat16>;

}  // namespace paged_kv::cpu
