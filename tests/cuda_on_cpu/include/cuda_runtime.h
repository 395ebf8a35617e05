// Twin of <cuda_runtime.h>: the toolkit's own types and function declarations (runtime.cpp defines those that are
// used), and everything that nvcc builds in, on the fibers of device.h.
#pragma once

#include <cuda_runtime_api.h>
#include <math.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <source_location>
#include <tuple>
#include <type_traits>

#include "../device.h"

#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif

using std::max;
using std::min;

// Objects, not macros: cudaLaunchConfig_t has fields called gridDim and blockDim.
namespace cuda_on_cpu {

template <class Source>
struct BuiltIn {
  struct {
    NOT_A_MEMORY_ACCESS operator unsigned() const { return Source::get().x; }
  } x;
  struct {
    NOT_A_MEMORY_ACCESS operator unsigned() const { return Source::get().y; }
  } y;
  struct {
    NOT_A_MEMORY_ACCESS operator unsigned() const { return Source::get().z; }
  } z;
};

struct ThreadIndex {
  NOT_A_MEMORY_ACCESS static const uint3& get() { return running->index; }
};
struct BlockIndex {
  NOT_A_MEMORY_ACCESS static const uint3& get() { return running->block->index; }
};
struct BlockSize {
  NOT_A_MEMORY_ACCESS static const dim3& get() { return running->block->launch->block; }
};
struct GridSize {
  NOT_A_MEMORY_ACCESS static const dim3& get() { return running->block->launch->grid; }
};

}  // namespace cuda_on_cpu

inline constexpr cuda_on_cpu::BuiltIn<cuda_on_cpu::ThreadIndex> threadIdx{};
inline constexpr cuda_on_cpu::BuiltIn<cuda_on_cpu::BlockIndex> blockIdx{};
inline constexpr cuda_on_cpu::BuiltIn<cuda_on_cpu::BlockSize> blockDim{};
inline constexpr cuda_on_cpu::BuiltIn<cuda_on_cpu::GridSize> gridDim{};
inline constexpr int warpSize = cuda_on_cpu::kWarpSize;

// ---------------------------------------------------------------------------------------------------------------------
// Launch

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  // Copied once, as a launch copies its parameters; the kernel then sees them by reference or takes its own copy.
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<std::remove_cvref_t<Parameters>...> parameters;
  } call{kernel, {std::forward<Arguments>(arguments)...}};
  return cuda_on_cpu::run({config->gridDim, config->blockDim, config->dynamicSmemBytes,
                           reinterpret_cast<const void*>(kernel),
                           [](void* argument) {
                             auto& c = *static_cast<Call*>(argument);
                             std::apply(c.kernel, c.parameters);
                           },
                           &call, sizeof(call)});
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers, votes, shuffles

using SourceLocation = std::source_location;

inline void __syncthreads(SourceLocation at = SourceLocation::current()) { cuda_on_cpu::block_barrier(false, at); }
inline int __syncthreads_or(int predicate, SourceLocation at = SourceLocation::current()) {
  return cuda_on_cpu::block_barrier(predicate != 0, at) != 0;
}
inline int __syncthreads_and(int predicate, SourceLocation at = SourceLocation::current()) {
  return cuda_on_cpu::block_barrier(predicate == 0, at) == 0;
}
inline int __syncthreads_count(int predicate, SourceLocation at = SourceLocation::current()) {
  return cuda_on_cpu::block_barrier(predicate != 0, at);
}

namespace cuda_on_cpu {

// Names a lane's value among those that its warp brings together; the twins support full warps only.
inline constexpr unsigned kAllLanes = 0xffffffffu;

inline void require_all_lanes(unsigned mask, const SourceLocation& at) {
  if (mask != kAllLanes) fail("warp operation with a mask that is not 0xffffffff", at);
}

template <class T>
T shuffle(const char* name, unsigned mask, T value, int source, const SourceLocation& at) {
  static_assert(std::is_trivially_copyable_v<T>);
  require_all_lanes(mask, at);
  struct Lane {
    T in, out;
    int source;
  } lane{value, value, source};
  warp_operation(
      name, &lane,
      [](void* const* lanes) NOT_A_MEMORY_ACCESS {
        for (int i = 0; i < kWarpSize; ++i) {
          Lane& to = *static_cast<Lane*>(lanes[i]);
          to.out = static_cast<const Lane*>(lanes[to.source])->in;
        }
      },
      at);
  return lane.out;
}

}  // namespace cuda_on_cpu

inline void __syncwarp(unsigned mask = cuda_on_cpu::kAllLanes, SourceLocation at = SourceLocation::current()) {
  cuda_on_cpu::require_all_lanes(mask, at);
  cuda_on_cpu::warp_operation("__syncwarp", nullptr, [](void* const*) {}, at, /*orders_memory=*/true);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, SourceLocation at = SourceLocation::current()) {
  const int lane = cuda_on_cpu::current_lane();
  return cuda_on_cpu::shuffle("__shfl_sync", mask, value, (lane & ~(width - 1)) | (source & (width - 1)), at);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize,
                  SourceLocation at = SourceLocation::current()) {
  const int lane = cuda_on_cpu::current_lane(), source = lane ^ bits;
  // A source in a higher segment of the warp gives the lane its own value back.
  return cuda_on_cpu::shuffle("__shfl_xor_sync", mask, value, source / width > lane / width ? lane : source, at);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                 SourceLocation at = SourceLocation::current()) {
  const int lane = cuda_on_cpu::current_lane(), source = lane - static_cast<int>(delta);
  return cuda_on_cpu::shuffle("__shfl_up_sync", mask, value, source < (lane & ~(width - 1)) ? lane : source, at);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   SourceLocation at = SourceLocation::current()) {
  const int lane = cuda_on_cpu::current_lane(), source = lane + static_cast<int>(delta);
  return cuda_on_cpu::shuffle("__shfl_down_sync", mask, value, source > (lane | (width - 1)) ? lane : source, at);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, SourceLocation at = SourceLocation::current()) {
  cuda_on_cpu::require_all_lanes(mask, at);
  struct Lane {
    bool predicate;
    unsigned votes;
  } lane{predicate != 0, 0};
  cuda_on_cpu::warp_operation(
      "__ballot_sync", &lane,
      [](void* const* lanes) NOT_A_MEMORY_ACCESS {
        unsigned votes = 0;
        for (int i = 0; i < warpSize; ++i) votes |= static_cast<unsigned>(static_cast<Lane*>(lanes[i])->predicate) << i;
        for (int i = 0; i < warpSize; ++i) static_cast<Lane*>(lanes[i])->votes = votes;
      },
      at);
  return lane.votes;
}
inline int __any_sync(unsigned mask, int predicate, SourceLocation at = SourceLocation::current()) {
  return __ballot_sync(mask, predicate, at) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SourceLocation at = SourceLocation::current()) {
  return __ballot_sync(mask, predicate, at) == cuda_on_cpu::kAllLanes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Atomics

template <class T>
T atomicAdd(T* address, T value, SourceLocation at = SourceLocation::current()) {
  cuda_on_cpu::observe(cuda_on_cpu::Access::kAtomic, address, sizeof(T), "atomic", at);
  return std::atomic_ref<T>(*address).fetch_add(value);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic, each operation rounded by itself (the build passes -ffp-contract=off)

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __ffs(int bits) { return bits == 0 ? 0 : std::countr_zero(static_cast<unsigned>(bits)) + 1; }
inline int __clz(int bits) { return std::countl_zero(static_cast<unsigned>(bits)); }

// Four bytes chosen from the eight of y:x by the low nibbles of `selector`.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = (uint64_t{y} << 32) | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> (4 * i) & 0xf;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7))) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;  // the sign of the byte, replicated
    result |= byte << (8 * i);
  }
  return result;
}
