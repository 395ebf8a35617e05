// Products of a cache of bytes with bfloat16 queries, where the CPU multiplies pairs of bfloat16 (vdpbf16ps). Every
// float8 and every int8 is exactly a bfloat16, and none is a subnormal one, which the CPU would take for zero. So the
// products are those of a bfloat16 cache, and a table of all magnitudes gives its two bytes. Two tokens are converted
// at once, since that fills vectors of bytes: six instructions for a chunk of each, of which three take the ports of
// permutations. (Zen 5, D 128, four rows, out of L1: both products take 6.2 ns a token and key head; with conversion to
// float32 10.8 with e5m2 and 17.4 with e4m3; 7.4 where each token is looked up alone.)
#pragma once

#include <bit>

#include "cpu/attention_products.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

#ifdef __AVX512BF16__
struct alignas(64) ByteTable {
  uint8_t bytes[64];

  PAGED_KV_INLINE __m512i load() const {
    __m512i v;
    std::memcpy(&v, bytes, sizeof(v));
    return v;
  }
};

// The bits of the bfloat16 that a magnitude of T is, below 128. That of 128 stands for int8's 0, which needs no table.
template <class T>
constexpr uint32_t bfloat16_of(uint32_t magnitude) {
  if constexpr (std::is_same_v<T, int8_t>) {
    return std::bit_cast<uint32_t>(magnitude == 0 ? 128.0f : static_cast<float>(magnitude)) >> 16;
  } else {
    constexpr bool kE4M3 = std::is_same_v<T, Float8E4M3>;
    constexpr uint32_t kMantissa = kE4M3 ? 3 : 2, kRebias = 127 - (kE4M3 ? 7 : 15);
    constexpr uint32_t kFirstSpecial = kE4M3 ? 0x7f : 0x7c;
    const uint32_t normal = (magnitude << (7 - kMantissa)) + (kRebias << 7);
    if (magnitude >= kFirstSpecial) return normal | 0x7f80;
    if (magnitude >= 1 << kMantissa) return normal;
    constexpr float kSmallest = std::bit_cast<float>((kRebias + 1 - kMantissa) << 23);
    return std::bit_cast<uint32_t>(static_cast<float>(magnitude) * kSmallest) >> 16;
  }
}

// Which bytes of two tokens' chunks to take: `byte(w)` for word w of the first vector after unpacking, and for that of
// the second, `second` more.
template <class F>
constexpr ByteTable byte_order(int second, F byte) {
  ByteTable order{};
  for (int i = 0; i < 64; ++i) {
    order.bytes[i] = static_cast<uint8_t>(byte(i / 16 * 8 + i % 8) + (i % 16 >= 8 ? second : 0));
  }
  return order;
}

template <class T>
struct BytesAsBFloat16 {
  struct Words {
    UintVec first, second;
  };

  // The bytes that `order` takes of two tokens' chunks.
  static PAGED_KV_INLINE Words convert(const ByteTable& order, Bytes first, Bytes second) {
    auto widen = [](Bytes bytes) __attribute__((always_inline)) {
      return _mm512_castsi256_si512(reinterpret_cast<__m256i>(bytes));
    };
    const __m512i bytes = _mm512_permutex2var_epi8(widen(first), order.load(), widen(second));
    // Looked up by their lower 7 bits.
    __m512i low, high;
    if constexpr (std::is_same_v<T, int8_t>) {
      const __m512i magnitudes = _mm512_abs_epi8(bytes);
      low = _mm512_permutex2var_epi8(kTable.low[0].load(), magnitudes, kTable.low[1].load());
      high = _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(bytes, bytes), kTable.high[0].load(), magnitudes,
                                            kTable.high[1].load());
    } else {
      low = _mm512_permutex2var_epi8(kTable.low[0].load(), bytes, kTable.low[1].load());
      high = _mm512_permutex2var_epi8(kTable.high[0].load(), bytes, kTable.high[1].load());
    }
    const UintVec sign = reinterpret_cast<UintVec>(bytes) & 0x80808080u;
    const __m512i signed_high = reinterpret_cast<__m512i>(reinterpret_cast<UintVec>(high) | sign);
    return {reinterpret_cast<UintVec>(_mm512_unpacklo_epi8(low, signed_high)),
            reinterpret_cast<UintVec>(_mm512_unpackhi_epi8(low, signed_high))};
  }

 private:
  // By magnitude, the lower and the upper byte of the bfloat16.
  static constexpr struct Table {
    ByteTable low[2], high[2];
  } kTable = [] {
    Table table{};
    for (uint32_t i = 0; i < 128; ++i) {
      table.low[i / 64].bytes[i % 64] = static_cast<uint8_t>(bfloat16_of<T>(i));
      table.high[i / 64].bytes[i % 64] = static_cast<uint8_t>(bfloat16_of<T>(i) >> 8);
    }
    return table;
  }();
};

template <class T>
struct ByteProducts : BFloat16Products {
  using Element = T;

  static PAGED_KV_INLINE Key load_key(const T* p, int count = kChunk) {
    return BytesAsBFloat16<T>::convert(kKeyOrder, load_bytes(p, count), Bytes{}).first;
  }
  static PAGED_KV_INLINE void load_two_keys(const T* first, const T* second, int count, Key* keys) {
    const auto both = BytesAsBFloat16<T>::convert(kKeyOrder, load_bytes(first, count), load_bytes(second, count));
    keys[0] = both.first;
    keys[1] = both.second;
  }

  static PAGED_KV_INLINE Value load_values(const T* first, const T* second, int count = kChunk) {
    const auto both = BytesAsBFloat16<T>::convert(kValueOrder, load_bytes(first, count), load_bytes(second, count));
    return {both.first, both.second};
  }
  static PAGED_KV_INLINE Value load_value(const T* p, int count = kChunk) {
    const auto both = BytesAsBFloat16<T>::convert(kValueOrder, load_bytes(p, count), Bytes{});
    return {both.first, both.second};
  }

  template <class Out>
  static PAGED_KV_INLINE void store_chunk(Out* out, const Chunk& chunk, int count) {
    store_in_order(out, chunk, count);
  }

  // A value of e5m2 may be infinite, so a weight that is not zero must not be taken for it: subnormal ones become
  // normal.
  static PAGED_KV_INLINE void store_weights(Weight* p, Vec weights) {
    if constexpr (std::is_same_v<T, Float8E5M2>) {
      constexpr uint32_t kSmallestNormal = 0x00800000;
      const UintVec raw = bits_of(weights);
      const auto is_subnormal = bits_of(abs(weights)) - 1u < kSmallestNormal - 1u;
      weights = from_bits(is_subnormal ? raw | kSmallestNormal : raw);
    }
    BFloat16Products::store_weights(p, weights);
  }

 private:
  // All of one token, and all of the other.
  static constexpr ByteTable kKeyOrder = byte_order(64, [](int word) { return word; });
  // Pairs of an element of both, of the first half of the elements, and of the second.
  static constexpr ByteTable kValueOrder = byte_order(16, [](int word) { return word / 2 + word % 2 * 64; });
};

// The same table for queries of other dtypes, with products in float32: five instructions for a chunk of keys and seven
// for one of values, where the way of float16 takes fourteen, so that decode takes 0.71 of the time. (Five of e5m2.)
struct E4M3FloatProducts : FloatProducts<Float8E4M3> {
  static constexpr float kUnit = 1.0f;

  static PAGED_KV_INLINE Key load_key(const Float8E4M3* p, int count = kChunk) {
    return to_chunk(BytesAsBFloat16<Float8E4M3>::convert(kOrder, load_bytes(p, count), Bytes{}).first);
  }
  static PAGED_KV_INLINE void load_two_keys(const Float8E4M3* first, const Float8E4M3* second, int count, Key* keys) {
    const auto both = BytesAsBFloat16<Float8E4M3>::convert(kOrder, load_bytes(first, count), load_bytes(second, count));
    keys[0] = to_chunk(both.first);
    keys[1] = to_chunk(both.second);
  }
  static PAGED_KV_INLINE Value load_value(const Float8E4M3* p, int count = kChunk) { return load_key(p, count); }

 private:
  // Elements of the first half of a chunk in the lower halves of the lanes, those of the second in the upper.
  static constexpr ByteTable kOrder = byte_order(64, [](int word) { return word / 2 + word % 2 * 16; });

  static PAGED_KV_INLINE Chunk to_chunk(UintVec words) {
    return {from_bits(words << 16), from_bits(words & 0xffff0000u)};
  }
};
#endif

}  // namespace paged_kv::cpu::PAGED_KV_ISA
