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

template <class T>
struct ByteProducts : BFloat16Products {
  using Element = T;

  static PAGED_KV_INLINE Key load_key(const T* p, int count = kChunk) {
    return to_bfloat16(arrange(kKeyOrder, load_bytes(p, count), Bytes{})).low;
  }
  static PAGED_KV_INLINE void load_two_keys(const T* first, const T* second, int count, Key* keys) {
    const Value both = to_bfloat16(arrange(kKeyOrder, load_bytes(first, count), load_bytes(second, count)));
    keys[0] = both.low;
    keys[1] = both.high;
  }

  static PAGED_KV_INLINE Value load_values(const T* first, const T* second, int count = kChunk) {
    return to_bfloat16(arrange(kValueOrder, load_bytes(first, count), load_bytes(second, count)));
  }
  static PAGED_KV_INLINE Value load_value(const T* p, int count = kChunk) {
    return to_bfloat16(arrange(kValueOrder, load_bytes(p, count), Bytes{}));
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

  // Which bytes of two chunks to take, so that after unpacking one vector is all of the first chunk, and the other all
  // of the second, or one the first half of both in pairs, and the other the second half.
  static constexpr auto kKeyOrder = [] {
    ByteTable order{};
    for (int i = 0; i < 64; ++i) order.bytes[i] = static_cast<uint8_t>((i & 8) * 8 + i / 16 * 8 + i % 8);
    return order;
  }();
  static constexpr auto kValueOrder = [] {
    ByteTable order{};
    for (int i = 0; i < 64; ++i) {
      order.bytes[i] = static_cast<uint8_t>((i & 1) * 64 + (i & 8) * 2 + i / 16 * 4 + i % 8 / 2);
    }
    return order;
  }();

  static PAGED_KV_INLINE __m512i arrange(const ByteTable& order, Bytes first, Bytes second) {
    auto widen = [](Bytes bytes) __attribute__((always_inline)) {
      return _mm512_castsi256_si512(reinterpret_cast<__m256i>(bytes));
    };
    return _mm512_permutex2var_epi8(widen(first), order.load(), widen(second));
  }

  static PAGED_KV_INLINE Value to_bfloat16(__m512i bytes) {
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
};
#endif

}  // namespace paged_kv::cpu::PAGED_KV_ISA
