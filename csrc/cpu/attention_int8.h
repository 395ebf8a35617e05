// The products of decode over an int8 cache with bfloat16 queries, in integers: pairs of 16-bit numbers multiplied and
// added in 32 bits without rounding (vpmaddwd), twice as many an instruction as float32 has, and no conversion to
// float32 before. Query rows and softmax weights become 16-bit integers for it, each row in a unit of its own, a power
// of two: a bfloat16 of at least 1/128 of its row's largest is exact, all others are off by at most half the unit,
// which is 2^-15 to 2^-14 of the largest. Weights are rounded to the unit of a tile, where bfloat16 would round each of
// them to 2^-9 of itself. On a core with AVX2, D 128 and four rows, decode out of L2 takes 0.53 of the time that
// bfloat16 takes; in float32 it took as long. What has no such unit (infinities, NaN, numbers near the ends of float32)
// goes by float32, as other queries do.
#pragma once

#include "cpu/attention_tile.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

#if PAGED_KV_WIDTH >= 8
struct Int8Products {
  using Element = int8_t;
  using Key = IntVec;  // 16-bit elements, in their own order
  struct Value {
    IntVec low, high;  // 16-bit elements of two tokens by turns, in an order of the instructions' own
  };
  using Operand = int16_t;
  using Sum = IntVec;
  struct ValueSums {
    IntVec low, high;
  };
  using Fallback = FloatProducts<int8_t>;  // its lane order is this one's, once a tile is ended
  static constexpr int kPair = 2;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kScaled = true;

  // The unit for numbers of which the largest magnitude is `largest`: 0 for zeros, NaN for NaN, whose products are NaN
  // as they are to be, and infinity where there is none.
  static PAGED_KV_INLINE float unit_for(float largest) {
    constexpr float kLeast = 0x1p-96f, kMost = 0x1p96f;  // so that neither the unit nor a product of it overflows
    if (largest == 0.0f || largest != largest) return largest;
    if (largest < kLeast || largest > kMost) return kInfinity;
    uint32_t raw;
    std::memcpy(&raw, &largest, sizeof(raw));
    raw = (raw & 0x7f800000u) - (14u << 23);
    float unit;
    std::memcpy(&unit, &raw, sizeof(unit));
    return unit;
  }
  static PAGED_KV_INLINE float inverse_of(float unit) { return unit > 0.0f ? 1.0f / unit : 0.0f; }

#if PAGED_KV_WIDTH == 16
  using Bytes = __m256i;
  static PAGED_KV_INLINE IntVec widen(Bytes bytes) { return reinterpret_cast<IntVec>(_mm512_cvtepi8_epi16(bytes)); }
  static PAGED_KV_INLINE IntVec multiply(IntVec a, IntVec b) {
    return reinterpret_cast<IntVec>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
  }
#else
  using Bytes = __m128i;
  static PAGED_KV_INLINE IntVec widen(Bytes bytes) { return reinterpret_cast<IntVec>(_mm256_cvtepi8_epi16(bytes)); }
  static PAGED_KV_INLINE IntVec multiply(IntVec a, IntVec b) {
    return reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
  }
#endif

  static PAGED_KV_INLINE Bytes load_bytes(const int8_t* p, int count) {
    Bytes bytes{};
    if (count == kChunk) {
      std::memcpy(&bytes, p, sizeof(bytes));
    } else {
      detail::copy_some<sizeof(bytes)>(&bytes, p, count);
    }
    return bytes;
  }

  static PAGED_KV_INLINE Key load_key(const int8_t* p, int count = kChunk) { return widen(load_bytes(p, count)); }

  template <int kTokens>
  static PAGED_KV_INLINE void add_scores(Sum* sums, const Key (&keys)[kTokens], const Operand* query) {
    const IntVec elements = keep(reinterpret_cast<IntVec>(detail::load_bits<UintVec>(query, kWidth)));
    for (int i = 0; i < kTokens; ++i) sums[i] += multiply(keys[i], elements);
  }
  static PAGED_KV_INLINE Vec to_floats(Sum sum) { return __builtin_convertvector(sum, Vec); }

  static PAGED_KV_INLINE Value pair_values(Bytes a, Bytes b) {
#if PAGED_KV_WIDTH == 16
    return {widen(_mm256_unpacklo_epi8(a, b)), widen(_mm256_unpackhi_epi8(a, b))};
#else
    return {widen(_mm_unpacklo_epi8(a, b)), widen(_mm_unpackhi_epi8(a, b))};
#endif
  }
  static PAGED_KV_INLINE Value load_values(const int8_t* first, const int8_t* second, int count = kChunk) {
    return pair_values(load_bytes(first, count), load_bytes(second, count));
  }
  static PAGED_KV_INLINE Value load_value(const int8_t* p, int count = kChunk) {
    return pair_values(load_bytes(p, count), Bytes{});
  }

  static PAGED_KV_INLINE IntVec load_operand(const Operand* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return reinterpret_cast<IntVec>(splat(pair));
  }
  static PAGED_KV_INLINE IntVec load_last_operand(const Operand* p) {
    return reinterpret_cast<IntVec>(splat(static_cast<uint32_t>(static_cast<uint16_t>(*p))));
  }

  static PAGED_KV_INLINE ValueSums start(const Chunk&, float) { return {IntVec{}, IntVec{}}; }
  static PAGED_KV_INLINE void add_value(ValueSums& sums, const Value& value, IntVec weights) {
    sums.low += multiply(value.low, weights);
    sums.high += multiply(value.high, weights);
  }
  static PAGED_KV_INLINE Chunk end(const ValueSums& sums, const Chunk& before, float factor, float unit) {
    Chunk sum{to_floats(sums.low), to_floats(sums.high)};
#if PAGED_KV_WIDTH == 16  // from elements 0-7 and 16-23 in low, the others in high
    sum = {__builtin_shufflevector(sum.low, sum.high, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
           __builtin_shufflevector(sum.low, sum.high, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)};
#endif
    return {fma(sum.low, splat(unit), before.low * factor), fma(sum.high, splat(unit), before.high * factor)};
  }

  // A query row of bfloat16 into scratch memory, with zeros up to a whole chunk. Returns the unit, infinity if it has
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
    const float inverse = inverse_of(unit);
    for_each_vector([&](int64_t i, Vec v) { store_weights(query + i, v * inverse); });
    return unit;
  }

  // Rounds to nearest even; magnitudes are below 2^15, and what rounds to that is one less.
  static PAGED_KV_INLINE void store_weights(Operand* p, Vec v) {
    constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
#if PAGED_KV_WIDTH == 8
    const IntVec integers = reinterpret_cast<IntVec>(bits_of(v + kToInteger) - bits_of(splat(kToInteger)));
    const __m256i wide = reinterpret_cast<__m256i>(integers);
    const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    std::memcpy(p, &narrow, sizeof(narrow));
#else
    const Vec bounded = min(splat(32767.0f), v);
    detail::store_bits(p, __builtin_convertvector(bits_of(bounded + kToInteger), Uint16Vec), kWidth);
#endif
  }
};
#endif

}  // namespace paged_kv::cpu::PAGED_KV_ISA
