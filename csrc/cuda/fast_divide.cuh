// Division by a number known at launch: a multiplication and a shift instead of the hardware's 20 to 40 instructions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace paged_kv::cuda {

// Exact for dividends below 2^31. Source: Granlund and Montgomery, "Division by Invariant Integers using
// Multiplication", PLDI 1994, with l = ceil(log2 d): q = (mulhi(n, m) + n) >> l, m = 2^32 (2^l - d) / d + 1.
struct FastDivide {
  uint32_t divisor, multiplier, shift;

  FastDivide() = default;
  explicit FastDivide(uint32_t d) : divisor(d), multiplier(0), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d) / d + 1);
  }

  __device__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }

  __device__ uint32_t divide(uint32_t n, uint32_t& remainder) const {
    const uint32_t quotient = divide(n);
    remainder = n - quotient * divisor;
    return quotient;
  }
};

}  // namespace paged_kv::cuda
