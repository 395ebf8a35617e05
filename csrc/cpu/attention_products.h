// The two products of attention for one cache dtype: score += key . query, and output += weight * value. A policy says
// how a chunk of a cache row becomes vectors, so that the kernels are written once:
//   FloatProducts<T>     converts to float32 and multiplies there
//   BFloat16Products     leaves bfloat16 as it is and multiplies pairs, where the CPU can (vdpbf16ps)
//   ByteProducts<T>      makes bfloat16 of bytes, for bfloat16 queries on such CPUs
//   E4M3FloatProducts    makes float32 of e4m3 by way of bfloat16, for other queries there
//   Int8Products         multiplies int8 keys with 16-bit integers, for decode with bfloat16 queries
// A chunk is 2 * kWidth neighbouring elements of the head dimension, two vectors of floats in an order of the policy's
// own, the *lane order*: sums over the dimension do not care, and output rows are put right at the end.
#pragma once

#include "cpu/simd.h"
#include "dispatch.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

inline constexpr int kChunk = 2 * kWidth;  // elements

struct Chunk {
  Vec low, high;
};

// The first `count` elements as floats in their own order, then zeros; 0 < count <= kChunk.
template <class T>
PAGED_KV_INLINE Chunk load_chunk(const T* p, int count) {
  if (count <= kWidth) return {load(p, count), Vec{}};
  return {load(p), load(p + kWidth, count - kWidth)};
}

template <class T>
PAGED_KV_INLINE Chunk load_chunk(const T* p) {
  return {load(p), load(p + kWidth)};
}

// The first `count` elements of a byte each as they are, then zeros; 0 < count <= kChunk.
typedef uint8_t Bytes __attribute__((vector_size(kChunk)));
PAGED_KV_INLINE Bytes load_bytes(const void* p, int count = kChunk) {
  Bytes bytes{};
  if (count == kChunk) {
    std::memcpy(&bytes, p, sizeof(bytes));
    return bytes;
  }
#if PAGED_KV_WIDTH == 16
  return reinterpret_cast<Bytes>(_mm256_maskz_loadu_epi8((1u << count) - 1, p));
#else
#if PAGED_KV_WIDTH == 8
  if (count == kWidth) return reinterpret_cast<Bytes>(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#endif
  detail::copy_some<sizeof(bytes)>(&bytes, p, count);
  return bytes;
#endif
}

// A chunk of float8, those of e4m3 in units of 1 / kE4M3PerHalf.
template <class T>
PAGED_KV_INLINE Chunk load_float8(const T* p, int count) {
  const auto [high, low] = detail::half_bytes(T{}, load_bytes(p, count));
#if PAGED_KV_WIDTH == 8
  const __m128i a = reinterpret_cast<__m128i>(low), b = reinterpret_cast<__m128i>(high);
  return {_mm256_cvtph_ps(_mm_unpacklo_epi8(a, b)), _mm256_cvtph_ps(_mm_unpackhi_epi8(a, b))};
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kChunk)));
#if PAGED_KV_WIDTH == 16  // where GCC 12 puts a vector of 64 bytes together from quarters
  auto widen = [](Bytes b) __attribute__((always_inline)) {
    return reinterpret_cast<Halves>(_mm512_cvtepu8_epi16(reinterpret_cast<__m256i>(b)));
  };
#else
  auto widen = [](Bytes b) __attribute__((always_inline)) { return __builtin_convertvector(b, Halves); };
#endif
  const Halves halves = widen(high) << 8 | widen(low);
  Uint16Vec parts[2];
  std::memcpy(parts, &halves, sizeof(halves));
  return {detail::from_halves(parts[0]), detail::from_halves(parts[1])};
#endif
}

// The first `count` elements of a chunk; 0 < count <= kChunk.
template <class Out>
PAGED_KV_INLINE void store_in_order(Out* out, const Chunk& chunk, int count) {
  store(out, chunk.low, count < kWidth ? count : kWidth);
  if (count > kWidth) store(out + kWidth, chunk.high, count - kWidth);
}

// The first `count` elements as they are, two in each lane, then zeros; 0 < count <= kChunk.
PAGED_KV_INLINE UintVec load_words(const BFloat16* p, int count = kChunk) {
  if (count == kChunk) return detail::load_bits<UintVec>(p, kWidth);
#if PAGED_KV_WIDTH == 16
  return reinterpret_cast<UintVec>(_mm512_maskz_loadu_epi16((1u << count) - 1, p));
#else
#if PAGED_KV_WIDTH == 8
  // Apart from other counts, as this one needs no way through memory: heads of 40 are twice as fast.
  if (count == kWidth) {
    return reinterpret_cast<UintVec>(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
#endif
  UintVec words{};
  detail::copy_some<sizeof(words)>(&words, p, count * static_cast<int>(sizeof(BFloat16)));
  return words;
#endif
}

// What policies share that multiply query rows as they are, and sum scores in floats.
struct FloatScores {
  using Sum = Vec;                        // of a score, lane by lane
  static constexpr bool kScaled = false;  // query rows have a unit each

  static PAGED_KV_INLINE Vec to_floats(Vec sum) { return sum; }
};

template <class T>
struct FloatProducts : FloatScores {
  using Element = T;
  using Key = Chunk;
  using Value = Chunk;
  using Operand = float;                 // in scratch memory: an element of a query row, in lane order
  using Weight = float;                  // the softmax weight of a key
  static constexpr int kPair = 1;        // operands that one multiplication takes
  static constexpr int kKeyVectors = 2;  // vectors of a chunk of keys
  // What the vectors of keys and values are to be multiplied by: once a score, and once a row of the output.
  static constexpr float kUnit = std::is_same_v<T, Float8E4M3> ? detail::kE4M3PerHalf : 1.0f;

  static PAGED_KV_INLINE Key load_key(const T* p, int count = kChunk) {
    if constexpr (std::is_same_v<T, Float8E4M3> || std::is_same_v<T, Float8E5M2>) {
      return load_float8(p, count);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      // Even elements in low, odd ones in high: two instructions, where keeping the order would take four.
      const UintVec words = load_words(p, count);
      return {from_bits(words << 16), from_bits(words & 0xffff0000u)};
    } else {
      return count == kChunk ? load_chunk(p) : load_chunk(p, count);
    }
  }

  // sums[i] += keys[i] . query over one chunk, lane by lane. A query is kept in a register if the keys leave room for
  // it.
  template <int kTokens>
  static PAGED_KV_INLINE void add_scores(Vec* sums, const Key (&keys)[kTokens], const Operand* query) {
    Vec low = load(query), high = load(query + kWidth);
    if constexpr (kTokens <= 4) {
      low = keep(low);
      for (int i = 0; i < kTokens; ++i) sums[i] = fma(keys[i].low, low, sums[i]);
      high = keep(high);
      for (int i = 0; i < kTokens; ++i) sums[i] = fma(keys[i].high, high, sums[i]);
    } else {
      for (int i = 0; i < kTokens; ++i) sums[i] = fma(keys[i].high, high, fma(keys[i].low, low, sums[i]));
    }
  }

  static PAGED_KV_INLINE Value load_value(const T* p, int count = kChunk) { return load_key(p, count); }
  static PAGED_KV_INLINE Vec load_operand(const Operand* p) { return splat(*p); }

  static PAGED_KV_INLINE void add_product(Vec& sum, Vec a, Vec b) { sum = fma(a, b, sum); }

  // sum += weight * value over one chunk.
  static PAGED_KV_INLINE void add_value(Chunk& sum, const Value& value, Vec weight) {
    sum.low = fma(value.low, weight, sum.low);
    sum.high = fma(value.high, weight, sum.high);
  }

  // The first `count` elements of a chunk in lane order, as elements of the output in theirs.
  template <class Out>
  static PAGED_KV_INLINE void store_chunk(Out* out, const Chunk& chunk, int count) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      static_assert(sizeof(Out) == sizeof(T), "the output has the dtype of a cache that is not quantised");
      const UintVec words = bfloat16_bits(chunk.low) | bfloat16_bits(chunk.high) << 16;
      if (count == kChunk) {
        std::memcpy(out, &words, sizeof(words));
      } else {
        detail::copy_some<sizeof(words)>(out, &words, count * static_cast<int>(sizeof(T)));
      }
    } else {
      store_in_order(out, chunk, count);
    }
  }

  // A query row into scratch memory, with zeros up to a whole chunk. Its dtype is the cache's own, unless that is
  // quantised. Returns the unit of its elements.
  static float load_query(const void* row, DType dtype, int64_t head_dim, Operand* query) {
    auto copy = [&](const auto* p, auto load_as) -> Error {
      for (int64_t i = 0; i < head_dim; i += kChunk) {
        const Chunk chunk = load_as(p + i, static_cast<int>(head_dim - i < kChunk ? head_dim - i : kChunk));
        store(query + i, chunk.low);
        store(query + i + kWidth, chunk.high);
      }
      return nullptr;
    };
    if constexpr (std::is_same_v<T, BFloat16>) {
      copy(static_cast<const T*>(row), [](const T* p, int count) { return load_key(p, count); });
    } else {
      dispatch_float(dtype, [&](auto tag) {
        using Q = cpu::Element<tag()>;
        return copy(static_cast<const Q*>(row), [](const Q* p, int count) { return load_chunk(p, count); });
      });
    }
    return 1.0f;
  }

  static PAGED_KV_INLINE void store_weights(Weight* p, Vec weights) { store(p, weights); }
};

#ifdef __AVX512BF16__
// Each lane adds the products of two pairs of bfloat16, in float32 and without rounding in between. For values the pair
// is one element of two neighbouring tokens, and weights are rounded to bfloat16.
struct BFloat16Products : FloatScores {
  using Element = BFloat16;
  using Key = UintVec;
  struct Value {
    UintVec low, high;
  };
  using Operand = BFloat16;
  using Weight = BFloat16;
  static constexpr int kPair = 2;
  static constexpr int kKeyVectors = 1;
  static constexpr float kUnit = 1.0f;

  static PAGED_KV_INLINE void add_product(Vec& sum, UintVec a, UintVec b) {
    sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static PAGED_KV_INLINE void add_product(Vec& sum, Vec a, UintVec b) { add_product(sum, bits_of(a), b); }

  static PAGED_KV_INLINE Key load_key(const BFloat16* p, int count = kChunk) { return load_words(p, count); }
  template <int kTokens>
  static PAGED_KV_INLINE void add_scores(Vec* sums, const Key (&keys)[kTokens], const Operand* query) {
    const UintVec words = load_words(query);
    for (int i = 0; i < kTokens; ++i) add_product(sums[i], keys[i], words);
  }

  // One chunk of two tokens, or of one and zeros. Unpacking pairs the elements within 128 bits: elements 0-3, 8-11,
  // 16-19 and 24-27 in low, the others in high.
  static PAGED_KV_INLINE Value pair_values(UintVec first, UintVec second) {
    const __m512i a = reinterpret_cast<__m512i>(first), b = reinterpret_cast<__m512i>(second);
    return {reinterpret_cast<UintVec>(_mm512_unpacklo_epi16(a, b)),
            reinterpret_cast<UintVec>(_mm512_unpackhi_epi16(a, b))};
  }
  static PAGED_KV_INLINE Value load_values(const BFloat16* first, const BFloat16* second, int count = kChunk) {
    return pair_values(load_words(first, count), load_words(second, count));
  }
  static PAGED_KV_INLINE Value load_value(const BFloat16* p, int count = kChunk) {
    return pair_values(load_words(p, count), UintVec{});
  }

  // Two neighbouring operands in every lane, or one and zero.
  static PAGED_KV_INLINE UintVec load_operand(const Operand* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return splat(pair);
  }
  static PAGED_KV_INLINE UintVec load_last_operand(const Operand* p) { return splat(static_cast<uint32_t>(p->bits)); }

  static PAGED_KV_INLINE void add_value(Chunk& sum, const Value& value, UintVec weights) {
    add_product(sum.low, value.low, weights);
    add_product(sum.high, value.high, weights);
  }

  template <class Out>
  static PAGED_KV_INLINE void store_chunk(Out* out, const Chunk& chunk, int count) {
    const auto [a, b] = chunk;
    const Chunk in_order{__builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
                         __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
    store_in_order(out, in_order, count);
  }

  static float load_query(const void* row, DType, int64_t head_dim, Operand* query) {
    const auto* p = static_cast<const BFloat16*>(row);
    for (int64_t i = 0; i < head_dim; i += kChunk) {
      const UintVec words = load_words(p + i, static_cast<int>(head_dim - i < kChunk ? head_dim - i : kChunk));
      detail::store_bits(query + i, words, kWidth);
    }
    return 1.0f;
  }

  // Subnormal weights become zero, as the product would take them.
  static PAGED_KV_INLINE void store_weights(Weight* p, Vec weights) {
    const auto words = _mm512_cvtneps_pbh(weights);
    std::memcpy(p, &words, sizeof(words));
  }
};
#endif

}  // namespace paged_kv::cpu::PAGED_KV_ISA
