// Every PTX instruction that the kernels use by name, one function each, and the only way to shared memory. Kernels
// include it as <arch/ptx.cuh>, so that a test build can put a twin in C++ first on the include path.
// Names in brackets are sections of the PTX ISA manual, "Instruction Set".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace paged_kv::ptx {

// The block's dynamic shared memory, seen as one object. The launch gives sizeof(T) bytes.
template <class T>
__device__ __forceinline__ T& dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return *reinterpret_cast<T*>(bytes);
}

namespace detail {
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
}  // namespace detail

// Starts copying 16 bytes to shared memory past L1, or fills them with zeros where not valid (`global` is then not read
// but must be an address). [cp.async]
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(detail::shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// The same for 4 bytes, through L1. [cp.async]
__device__ __forceinline__ void cp_async_4(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(detail::shared_address(shared)), "l"(global),
               "r"(valid ? 4 : 0)
               : "memory");
}

// Makes a group of this thread's copies since the last commit. [cp.async.commit_group]
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kGroups of this thread's groups are still under way. [cp.async.wait_group]
template <int kGroups>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8 and gets elements
// 2 * (i % 4) and the next of row i / 4 of each. [ldmatrix]
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(row))
               : "memory");
}

// The same, each matrix transposed: lane i gets column i / 4 of rows 2 * (i % 4) and the next. [ldmatrix, .trans]
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(row))
               : "memory");
}

// d[16x8] += a[16x16] * b[16x8], float32 sums. With g = lane / 4 and c = lane % 4, a lane holds of d: (g, 2c), (g,
// 2c+1), (g+8, 2c), (g+8, 2c+1); of a: pairs of columns (g, 2c), (g+8, 2c), (g, 2c+8), (g+8, 2c+8); of b: pairs of rows
// (2c, g), (2c+8, g). [mma, .m16n8k16]
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x, subnormal results flushed to 0. [ex2]
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger, NaN where either is. [max, .NaN]
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// 16, 8 or 4 bytes as words.
template <int kBytes>
struct alignas(kBytes) Words {
  uint32_t word[kBytes / 4];
};

// Reads memory that nothing writes while the kernel runs, once: it does not displace others in L1. [ld.global.nc]
template <int kBytes>
__device__ __forceinline__ Words<kBytes> load_once(const void* global);

template <>
__device__ __forceinline__ Words<16> load_once<16>(const void* global) {
  Words<16> w;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
               : "l"(global));
  return w;
}
template <>
__device__ __forceinline__ Words<8> load_once<8>(const void* global) {
  Words<8> w;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(w.word[0]), "=r"(w.word[1]) : "l"(global));
  return w;
}
template <>
__device__ __forceinline__ Words<4> load_once<4>(const void* global) {
  Words<4> w;
  asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(w.word[0]) : "l"(global));
  return w;
}

// Writes 16, 8 or 4 bytes. [st.global]
__device__ __forceinline__ void store(void* global, const Words<16>& w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]),
               "r"(w.word[3])
               : "memory");
}
__device__ __forceinline__ void store(void* global, const Words<8>& w) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(global), "r"(w.word[0]), "r"(w.word[1]) : "memory");
}
__device__ __forceinline__ void store(void* global, const Words<4>& w) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(global), "r"(w.word[0]) : "memory");
}

// Reads 16 bytes of shared memory. [ld.shared]
__device__ __forceinline__ Words<16> load_shared_16(const void* shared) {
  Words<16> w;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
               : "r"(detail::shared_address(shared))
               : "memory");
  return w;
}

// Writes 16 bytes of shared memory. [st.shared]
__device__ __forceinline__ void store_shared(void* shared, const Words<16>& w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(detail::shared_address(shared)), "r"(w.word[0]),
               "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3])
               : "memory");
}

}  // namespace paged_kv::ptx
