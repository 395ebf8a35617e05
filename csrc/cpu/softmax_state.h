// Online softmax over natural exponentials: what is known of a row after some of its keys, without the values.
//   max = largest score seen, sum = sum of e^(score - max); the row's accumulated values carry the same factor e^-max.
// Empty is max = -inf, sum = 0, values 0, and the same where every score seen is -inf.
#pragma once

#include "cpu/simd.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

// The larger, NaN where either is.
PAGED_KV_INLINE float max_or_nan(float a, float b) { return a > b ? a : b >= a ? b : a + b; }

// What scores are measured from: any finite number serves where all of them are -inf.
PAGED_KV_INLINE float shift_of(float max) { return max == -kInfinity ? 0.0f : max; }

PAGED_KV_INLINE float exp(float x) { return exp(splat(x))[0]; }

struct SoftmaxState {
  float max = -kInfinity;
  float sum = 0.0f;

  // Makes room for scores up to tile_max; returns what the values accumulated so far have to be multiplied by.
  PAGED_KV_INLINE float advance(float tile_max) {
    const float larger = max_or_nan(max, tile_max);
    if (larger == max) return 1.0f;
    const float factor = exp(max - shift_of(larger));
    max = larger;
    sum *= factor;
    return factor;
  }

  // Takes in the state of other keys; the values become values * mine + other's * theirs.
  PAGED_KV_INLINE void merge(const SoftmaxState& other, float& mine, float& theirs) {
    mine = advance(other.max);
    theirs = other.max == max ? 1.0f : exp(other.max - shift_of(max));
    sum += other.sum * theirs;
  }

  // With all keys seen, and at least one: what to multiply the values by, and the log-sum-exp. A sink is one more score
  // whose value is zero; -inf is none.
  PAGED_KV_INLINE void finish(float sink, float& factor, float& lse) const {
    const float larger = max_or_nan(max, sink);
    if (larger == kInfinity) {
      factor = max == kInfinity ? kNaN : 0.0f;
      lse = kInfinity;
      return;
    }
    const float shift = shift_of(larger);
    // Without a sink both exponentials are known, and a small decode shows what they take.
    const float mine = max == shift ? 1.0f : exp(max - shift);
    const float total = sink == -kInfinity ? sum * mine : sum * mine + exp(sink - shift);
    factor = mine / total;  // 0 / 0 where every score is -inf: NaN, as in the formula
    lse = shift + __builtin_logf(total);
  }
};

}  // namespace paged_kv::cpu::PAGED_KV_ISA
