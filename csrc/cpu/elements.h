// The bytes that a tensor of each dtype is made of, as C++ types without arithmetic: simd.h turns them into floats.
#pragma once

#include <cstdint>

#include "params.h"

namespace paged_kv::cpu {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8E4M3 {  // float8_e4m3fn: no infinity, NaN is 0x7f or 0xff, largest 448
  uint8_t bits;
};
struct Float8E5M2 {  // the upper byte of a float16, largest 57344
  uint8_t bits;
};

namespace detail {
template <DType>
struct Element;
template <>
struct Element<DType::kFloat32> {
  using type = float;
};
template <>
struct Element<DType::kFloat16> {
  using type = Float16;
};
template <>
struct Element<DType::kBFloat16> {
  using type = BFloat16;
};
template <>
struct Element<DType::kFloat8E4M3> {
  using type = Float8E4M3;
};
template <>
struct Element<DType::kFloat8E5M2> {
  using type = Float8E5M2;
};
template <>
struct Element<DType::kInt8> {
  using type = int8_t;
};
}  // namespace detail

// The C++ type of a dtype's elements, e.g. Element<tag()> in the lambda of a dispatch function.
template <DType kType>
using Element = typename detail::Element<kType>::type;

}  // namespace paged_kv::cpu
