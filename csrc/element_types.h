// The C++ types of a tensor's elements, the same on every device but for the 16-bit floats, of which each has its own.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"

namespace paged_kv {

struct Float8E4M3 {  // float8_e4m3fn: no infinity, NaN is 0x7f or 0xff, largest 448
  uint8_t bits;
};
struct Float8E5M2 {  // the upper byte of a float16, largest 57344
  uint8_t bits;
};

namespace detail {
template <DType kType, class Float16, class BFloat16>
constexpr auto element_of() {
  if constexpr (kType == DType::kFloat32) return std::type_identity<float>{};
  if constexpr (kType == DType::kFloat16) return std::type_identity<Float16>{};
  if constexpr (kType == DType::kBFloat16) return std::type_identity<BFloat16>{};
  if constexpr (kType == DType::kFloat8E4M3) return std::type_identity<Float8E4M3>{};
  if constexpr (kType == DType::kFloat8E5M2) return std::type_identity<Float8E5M2>{};
  if constexpr (kType == DType::kInt8) return std::type_identity<int8_t>{};
}
}  // namespace detail

// A dtype's elements, where `Float16` and `BFloat16` are the device's.
template <DType kType, class Float16, class BFloat16>
using ElementOf = typename decltype(detail::element_of<kType, Float16, BFloat16>())::type;

}  // namespace paged_kv
