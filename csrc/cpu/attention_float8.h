// Both products of a float8 cache with bfloat16 queries, where the CPU multiplies pairs of bfloat16 (vdpbf16ps). Every
// float8 is exactly a bfloat16, and none is a subnormal one, which the CPU would take for zero. So the products are
// those of a bfloat16 cache, and a table of all magnitudes gives its two bytes. Two tokens are converted at once, since
// that fills vectors of bytes: six instructions for a chunk of each, of which three take the ports of permutations.
// (Zen 5, D 128, four rows, out of L1: the products take 6.2 ns a token and key head, and by float32 10.8 with e5m2 and
// 17.4 with e4m3; 7.4 where each token is looked up alone.)
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

// By magnitude, the lower and the upper byte of the bfloat16 that a float8 of kExponent and kMantissa bits is.
struct Float8Table {
  ByteTable low[2], high[2];
};

template <int kExponent, int kMantissa>
constexpr Float8Table float8_table() {
  constexpr uint32_t kRebias = 127 - ((1 << (kExponent - 1)) - 1);
  constexpr uint32_t kFirstSpecial = kExponent == 4 ? 0x7f : 0x7c;  // e4m3fn: only all ones is NaN
  constexpr float kSmallest = std::bit_cast<float>((kRebias + 1 - kMantissa) << 23);
  Float8Table table{};
  for (uint32_t magnitude = 0; magnitude < 128; ++magnitude) {
    uint32_t raw = (magnitude << (7 - kMantissa)) + (kRebias << 7);
    if (magnitude >> kMantissa == 0) raw = std::bit_cast<uint32_t>(static_cast<float>(magnitude) * kSmallest) >> 16;
    if (magnitude >= kFirstSpecial) raw |= 0x7f80;
    table.low[magnitude / 64].bytes[magnitude % 64] = static_cast<uint8_t>(raw);
    table.high[magnitude / 64].bytes[magnitude % 64] = static_cast<uint8_t>(raw >> 8);
  }
  return table;
}

template <class T>
struct Float8Products : BFloat16Products {
  using Element = T;

  static PAGED_KV_INLINE Key load_key(const T* p, int count = kChunk) {
    return to_bfloat16(arrange(kKeyOrder, load_bytes(p, count), __m512i{})).low;
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
    return to_bfloat16(arrange(kValueOrder, load_bytes(p, count), __m512i{}));
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
    store(p, weights);
  }

 private:
  static constexpr Float8Table kTable = std::is_same_v<T, Float8E4M3> ? float8_table<4, 3>() : float8_table<5, 2>();

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

  // The first `count` bytes, which all orders take from the lower half of the vector alone.
  static PAGED_KV_INLINE __m512i load_bytes(const T* p, int count) {
    __m256i bytes;
    if (count == kChunk) {
      std::memcpy(&bytes, p, sizeof(bytes));
    } else {
      bytes = _mm256_maskz_loadu_epi8((1u << count) - 1, p);
    }
    return _mm512_castsi256_si512(bytes);
  }

  static PAGED_KV_INLINE __m512i arrange(const ByteTable& order, __m512i first, __m512i second) {
    return _mm512_permutex2var_epi8(first, order.load(), second);
  }

  static PAGED_KV_INLINE Value to_bfloat16(__m512i bytes) {
    const __m512i low = look_up(kTable.low, bytes);
    const UintVec sign = reinterpret_cast<UintVec>(bytes) & 0x80808080u;
    const __m512i high = reinterpret_cast<__m512i>(reinterpret_cast<UintVec>(look_up(kTable.high, bytes)) | sign);
    return {reinterpret_cast<UintVec>(_mm512_unpacklo_epi8(low, high)),
            reinterpret_cast<UintVec>(_mm512_unpackhi_epi8(low, high))};
  }
  static PAGED_KV_INLINE __m512i look_up(const ByteTable (&table)[2], __m512i bytes) {
    return _mm512_permutex2var_epi8(table[0].load(), bytes, table[1].load());  // by their lower 7 bits
  }
};
#endif

}  // namespace paged_kv::cpu::PAGED_KV_ISA
