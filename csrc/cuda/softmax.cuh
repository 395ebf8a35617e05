// Online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): what is kept of the
// scores seen so far, while the weighted values are summed beside it.
#pragma once

#include <arch/ptx.cuh>

namespace paged_kv::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float exp_of(float x) { return ptx::exp2(x * kLog2E); }

// What a sum over other keys is multiplied with, given the exponential in `y`: 0 for x = -inf alone, so that an
// infinity stays one however far below the largest score it lies, as in exact arithmetic, and does not become NaN.
__device__ __forceinline__ float above_zero(float y, float x) {
  return x == -INFINITY ? 0.0f : ptx::max_or_nan(y, 0x1p-126f);
}

// m: the largest score, in natural units, NaN if one is; d: the sum of exp(score - m). Values are summed with the same
// weights. Empty, before any score: m = -inf, d = 0, values 0.
struct SoftmaxState {
  float m = -INFINITY;
  float d = 0.0f;

  // What scores are measured from: m, but never -inf, so that -inf scores weigh 0 instead of NaN.
  __device__ float base() const { return m == -INFINITY ? 0.0f : m; }

  // exp(score - m) times 2^shift
  __device__ float weight(float score, float shift = 0.0f) const {
    return ptx::exp2((score - base()) * kLog2E + shift);
  }

  // What the sums of a state are multiplied with whose largest score is at most m.
  __device__ float weight_of(const SoftmaxState& other) const {
    const float x = other.m - base();
    return above_zero(exp_of(x), x);
  }

  // Raises m to at least `score`; returns what everything summed so far has to be multiplied with.
  __device__ float raise(float score) {
    const float before = m;
    m = ptx::max_or_nan(m, score);
    const float factor = exp_of(before - base());
    d *= factor;
    return factor;
  }
};

}  // namespace paged_kv::cuda
