// From a dtype known at run time to one known at compile time. The lists are closed: a dtype outside of one is an error
// that says what is supported, never a silent gap. Used by every device.
#pragma once

#include <type_traits>
#include <utility>

#include "backend.h"

namespace paged_kv {

template <DType kType>
using DTypeConstant = std::integral_constant<DType, kType>;

namespace detail {

template <DType... kTypes, class F>
Error dispatch_among(DType type, Error unsupported, F&& f) {
  Error error = unsupported;
  ((type == kTypes && (error = f(DTypeConstant<kTypes>{}), true)) || ...);
  return error;
}

}  // namespace detail

// Calls f(DTypeConstant<type>{}), which returns an Error, for a dtype of queries and outputs.
template <class F>
Error dispatch_float(DType type, F&& f) {
  return detail::dispatch_among<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(
      type, "dtype must be float32, float16 or bfloat16", std::forward<F>(f));
}

// Calls f(DTypeConstant<type>{}), which returns an Error, for a dtype of quantised caches.
template <class F>
Error dispatch_quantised(DType type, F&& f) {
  return detail::dispatch_among<DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8>(
      type, "dtype must be float8_e4m3fn, float8_e5m2 or int8", std::forward<F>(f));
}

// Calls f(DTypeConstant<type>{}), which returns an Error, for any dtype that a cache may have.
template <class F>
Error dispatch_cache(DType type, F&& f) {
  return detail::dispatch_among<DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                                DType::kFloat8E5M2, DType::kInt8>(
      type, "dtype must be float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8", std::forward<F>(f));
}

}  // namespace paged_kv
