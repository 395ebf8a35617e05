// Online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): what is kept of the
// scores seen so far, while the weighted values are summed beside it.
#pragma once

#include <arch/ptx.cuh>

namespace paged_kv::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float exp_of(float x) { return ptx::exp2(x * kLog2E); }

// m: the largest score, in natural units; d: the sum of exp(score - m). Values are summed with the same weights. Empty,
// before any score: m = -inf, d = 0, values 0.
struct SoftmaxState {
  float m = -INFINITY;
  float d = 0.0f;

  // What scores are measured from: m, but never -inf, so that -inf scores weigh 0 instead of NaN.
  __device__ float base() const { return m == -INFINITY ? 0.0f : m; }

  // exp(score - m)
  __device__ float weight(float score) const { return exp_of(score - base()); }

  // Raises m to at least `score`; returns what everything summed so far has to be multiplied with.
  __device__ float raise(float score) {
    const float before = m;
    m = fmaxf(m, score);
    const float factor = exp_of(before - base());
    d *= factor;
    return factor;
  }
};

}  // namespace paged_kv::cuda
