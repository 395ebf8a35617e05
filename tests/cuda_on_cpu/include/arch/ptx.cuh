// Twin of csrc/arch/ptx.cuh: the same functions in C++, on the fibers of device.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "../../device.h"

namespace paged_kv::ptx {

using SourceLocation = std::source_location;
using cuda_on_cpu::Access;

namespace detail {

// The arithmetic of one warp; the operands of lane i are a[i], b[i], d[i].
struct MmaOperands {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};
void mma_bfloat16(void* const* lanes);
void mma_float16(void* const* lanes);

struct LdmatrixOperands {
  uint32_t* r;
  const void* row;
};
void ldmatrix(void* const* lanes);
void ldmatrix_trans(void* const* lanes);

inline void require_alignment(const void* address, size_t bytes, const SourceLocation& at) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) cuda_on_cpu::fail("access not aligned to its size", at);
}

}  // namespace detail

template <class T>
T& dynamic_smem(SourceLocation at = SourceLocation::current()) {
  return *static_cast<T*>(cuda_on_cpu::shared_memory(sizeof(T), at));
}

inline void cp_async_16(void* shared, const void* global, bool valid, SourceLocation at = SourceLocation::current()) {
  cuda_on_cpu::async_copy(shared, valid ? global : nullptr, 16, "cp.async.16", at);
}
inline void cp_async_4(void* shared, const void* global, bool valid, SourceLocation at = SourceLocation::current()) {
  cuda_on_cpu::async_copy(shared, valid ? global : nullptr, 4, "cp.async.4", at);
}
inline void cp_async_commit() { cuda_on_cpu::async_commit(); }
template <int kGroups>
void cp_async_wait() {
  cuda_on_cpu::async_wait(kGroups);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, SourceLocation at = SourceLocation::current()) {
  detail::require_alignment(row, 16, at);
  cuda_on_cpu::observe(Access::kRead, row, 16, "ldmatrix", at);
  detail::LdmatrixOperands operands{r, row};
  cuda_on_cpu::warp_operation("ldmatrix", &operands, detail::ldmatrix, at);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, SourceLocation at = SourceLocation::current()) {
  detail::require_alignment(row, 16, at);
  cuda_on_cpu::observe(Access::kRead, row, 16, "ldmatrix.trans", at);
  detail::LdmatrixOperands operands{r, row};
  cuda_on_cpu::warp_operation("ldmatrix.trans", &operands, detail::ldmatrix_trans, at);
}

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  SourceLocation at = SourceLocation::current()) {
  constexpr bool kIsBFloat16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kIsBFloat16 || std::is_same_v<T, __half>);
  detail::MmaOperands operands{d, a, {b0, b1}};
  cuda_on_cpu::warp_operation(kIsBFloat16 ? "mma.bf16" : "mma.f16", &operands,
                              kIsBFloat16 ? detail::mma_bfloat16 : detail::mma_float16, at);
}

inline float exp2(float x) {
  const float y = ::exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;  // NaN stays
}

inline float max_or_nan(float a, float b) { return a > b ? a : b >= a ? b : a + b; }

template <int kBytes>
struct alignas(kBytes) Words {
  uint32_t word[kBytes / 4];
};

namespace detail {

// NOT_A_MEMORY_ACCESS: observed as the instruction that they stand for, and not once more as plain accesses.
template <int kBytes>
NOT_A_MEMORY_ACCESS Words<kBytes> load(const void* address, const char* instruction, const SourceLocation& at) {
  require_alignment(address, kBytes, at);
  cuda_on_cpu::observe(Access::kRead, address, kBytes, instruction, at);
  Words<kBytes> w;
  std::memcpy(&w, address, kBytes);
  return w;
}

template <int kBytes>
NOT_A_MEMORY_ACCESS void store(void* address, const Words<kBytes>& w, const char* instruction,
                               const SourceLocation& at) {
  require_alignment(address, kBytes, at);
  cuda_on_cpu::observe(Access::kWrite, address, kBytes, instruction, at);
  std::memcpy(address, &w, kBytes);
}

}  // namespace detail

template <int kBytes>
Words<kBytes> load_once(const void* global, SourceLocation at = SourceLocation::current()) {
  return detail::load<kBytes>(global, "ld.global.nc", at);
}
template <int kBytes>
void store(void* global, const Words<kBytes>& w, SourceLocation at = SourceLocation::current()) {
  detail::store(global, w, "st.global", at);
}
inline Words<16> load_shared_16(const void* shared, SourceLocation at = SourceLocation::current()) {
  return detail::load<16>(shared, "ld.shared", at);
}
inline void store_shared(void* shared, const Words<16>& w, SourceLocation at = SourceLocation::current()) {
  detail::store(shared, w, "st.shared", at);
}

}  // namespace paged_kv::ptx
