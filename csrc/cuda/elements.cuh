// Elements of every dtype as CUDA types, and their way to float32 and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <arch/ptx.cuh>
#include <cstdint>
#include <type_traits>

#include "element_types.h"

namespace paged_kv::cuda {

// The C++ type of a dtype's elements, e.g. Element<tag()> in the lambda of a dispatch function.
template <DType kType>
using Element = ElementOf<kType, __half, __nv_bfloat16>;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(Float8E4M3 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
}
__device__ __forceinline__ float to_float(Float8E5M2 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E5M2)));
}
__device__ __forceinline__ float to_float(int8_t x) { return static_cast<float>(x); }

// By the bits of the exponent, all ones in infinity and NaN; e4m3 has NaN alone, all ones but the sign.
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < INFINITY; }
__device__ __forceinline__ bool is_finite(__half x) { return (__half_as_ushort(x) & 0x7c00) != 0x7c00; }
__device__ __forceinline__ bool is_finite(__nv_bfloat16 x) { return (__bfloat16_as_ushort(x) & 0x7f80) != 0x7f80; }
__device__ __forceinline__ bool is_finite(Float8E4M3 x) { return (x.bits & 0x7f) != 0x7f; }
__device__ __forceinline__ bool is_finite(Float8E5M2 x) { return (x.bits & 0x7c) != 0x7c; }
__device__ __forceinline__ bool is_finite(int8_t) { return true; }

// Rounds to nearest even. Float formats overflow to infinity; fp8 and int8 clamp to their largest finite value, and NaN
// is NaN in fp8 and 0 in int8.
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<T, Float8E4M3>) {
    return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
  } else if constexpr (std::is_same_v<T, Float8E5M2>) {
    return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2)};
  } else {
    static_assert(std::is_same_v<T, int8_t>);
    return x == x ? static_cast<int8_t>(rintf(fminf(fmaxf(x, -127.0f), 127.0f))) : int8_t{0};
  }
}

// Calls f(Element<type>{}) for a float dtype known at run time, the same for all lanes of a warp.
template <class F>
__device__ __forceinline__ auto with_float(DType type, F&& f) {
  if (type == DType::kBFloat16) return f(__nv_bfloat16{});
  if (type == DType::kFloat16) return f(__half{});
  return f(float{});
}

// Calls f(Element<type>{}) for a quantised dtype known at run time, the same for all lanes of a warp. For code in which
// the conversion is a small part, so that an instance for each dtype would not pay.
template <class F>
__device__ __forceinline__ auto with_quantised(DType type, F&& f) {
  if (type == DType::kFloat8E4M3) return f(Float8E4M3{});
  if (type == DType::kFloat8E5M2) return f(Float8E5M2{});
  return f(int8_t{});
}

// kCount neighbouring elements in registers, moved by one access.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T element[kCount];
};

// Reads memory that nothing writes while the kernel runs.
template <int kCount, class T>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* p) {
  Pack<T, kCount> pack;
  if constexpr (sizeof(pack) >= 4) {
    const auto words = ptx::load_once<sizeof(pack)>(p);
    memcpy(&pack, &words, sizeof(pack));
  } else {
    static_assert(kCount == 1, "one access moves a pack");
    pack.element[0] = *p;
  }
  return pack;
}

template <int kCount, class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, kCount>& pack) {
  if constexpr (sizeof(pack) >= 4) {
    ptx::Words<sizeof(pack)> words;
    memcpy(&words, &pack, sizeof(pack));
    ptx::store(p, words);
  } else {
    static_assert(kCount == 1, "one access moves a pack");
    *p = pack.element[0];
  }
}

// Whether addresses p + (any sum of multiples of the strides) elements are multiples of `bytes`.
template <class... Strides>
bool is_aligned(const void* p, int64_t bytes, int64_t element_bytes, Strides... strides) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0 &&
         ((strides * element_bytes % bytes == 0) && ...);
}

// The largest power of two, at most 16, that divides both numbers of bytes; the size of one access.
inline int64_t common_access(int64_t a, int64_t b) {
  int64_t bytes = 16;
  while (a % bytes != 0 || b % bytes != 0) bytes /= 2;
  return bytes;
}

}  // namespace paged_kv::cuda
