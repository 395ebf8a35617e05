// The scores of decode over an int8 cache with bfloat16 queries, in integers: pairs of 16-bit numbers multiplied and
// added in 32 bits without rounding (vpmaddwd), twice as many an instruction as float32 has, and no conversion to
// float32 before. Each query row becomes 16-bit integers in a unit of its own, a power of two: a bfloat16 of at least
// 1/128 of its row's largest is exact, all others are off by at most half the unit, which is 2^-15 to 2^-14 of the
// largest. Rows without a unit (infinities, NaN, numbers near the ends of float32), and values, go by bfloat16 where
// the CPU multiplies that, else by float32. Integers are not for softmax weights: next to one that is large and whose
// value is small, as the first token's often is, all others of a tile round to nothing.
#pragma once

#include "cpu/attention_bytes.h"
#include "cpu/attention_tile.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

#if PAGED_KV_WIDTH >= 8
#ifdef __AVX512BF16__
using Int8Fallback = ByteProducts<int8_t>;
#else
using Int8Fallback = FloatProducts<int8_t>;
#endif

struct Int8Products : Int8Fallback {
  using Fallback = Int8Fallback;
  using Key = IntVec;  // 16-bit elements
  using Operand = int16_t;
  using Sum = IntVec;
  static constexpr bool kScaled = true;

#if PAGED_KV_WIDTH == 16
  static PAGED_KV_INLINE IntVec widen(Bytes bytes) {
    return reinterpret_cast<IntVec>(_mm512_cvtepi8_epi16(reinterpret_cast<__m256i>(bytes)));
  }
  static PAGED_KV_INLINE IntVec multiply_add(IntVec a, IntVec b, IntVec sum) {
    const __m512i left = reinterpret_cast<__m512i>(a), right = reinterpret_cast<__m512i>(b);
#ifdef __AVX512VNNI__
    return reinterpret_cast<IntVec>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum), left, right));
#else
    return sum + reinterpret_cast<IntVec>(_mm512_madd_epi16(left, right));
#endif
  }
#else
  static PAGED_KV_INLINE IntVec widen(Bytes bytes) {
    return reinterpret_cast<IntVec>(_mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(bytes)));
  }
  static PAGED_KV_INLINE IntVec multiply_add(IntVec a, IntVec b, IntVec sum) {
    return sum +
           reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
  }
#endif

  static PAGED_KV_INLINE Key load_key(const int8_t* p, int count = kChunk) { return widen(load_bytes(p, count)); }

  static PAGED_KV_INLINE void load_two_keys(const int8_t* first, const int8_t* second, int count, Key* keys) {
    keys[0] = load_key(first, count);
    keys[1] = load_key(second, count);
  }

  template <int kTokens>
  static PAGED_KV_INLINE void add_scores(Sum* sums, const Key (&keys)[kTokens], const Operand* query) {
    const IntVec elements = keep(reinterpret_cast<IntVec>(detail::load_bits<UintVec>(query, kWidth)));
    for (int i = 0; i < kTokens; ++i) sums[i] = multiply_add(keys[i], elements, sums[i]);
  }
  static PAGED_KV_INLINE Vec to_floats(Sum sum) { return __builtin_convertvector(sum, Vec); }

  // The unit for a row whose largest magnitude is `largest`: 0 for zeros, and infinity where there is none.
  static float unit_for(float largest) {
    constexpr float kLeast = 0x1p-96f, kMost = 0x1p96f;  // so that neither the unit nor a product of it overflows
    if (largest == 0.0f) return 0.0f;
    if (!(largest >= kLeast && largest <= kMost)) return kInfinity;
    return from_bits((bits_of(splat(largest)) & 0x7f800000u) - (14u << 23))[0];
  }

  // A query row of bfloat16 into scratch memory, with zeros up to a whole chunk. Returns its unit, infinity if it has
  // none; then nothing is written.
  static float load_query(const void* row, DType, int64_t head_dim, Operand* query) {
    const auto* p = static_cast<const BFloat16*>(row);
    auto for_each_vector = [&](auto f) {
      for (int64_t i = 0; i < round_up(head_dim, kChunk); i += kWidth) {
        f(i, load(p + i, static_cast<int>(std::clamp<int64_t>(head_dim - i, 0, kWidth))));
      }
    };
    Vec largest{};
    IntVec not_a_number{};
    for_each_vector([&](int64_t, Vec v) {
      largest = max(abs(v), largest);
      not_a_number |= v != v;
    });
    const float unit = any(not_a_number) ? kInfinity : unit_for(reduce_max(largest));
    if (unit == kInfinity) return unit;
    const float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
    for_each_vector([&](int64_t i, Vec v) {
      constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits, rounded
      const UintVec integers = bits_of(v * inverse + kToInteger);
      detail::store_bits(query + i, __builtin_convertvector(integers, Uint16Vec), kWidth);
    });
    return unit;
  }
};
#endif

}  // namespace paged_kv::cpu::PAGED_KV_ISA
