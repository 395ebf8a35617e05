#include "manager/sha256.h"

#include <bit>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace paged_kv::manager {
namespace {

constexpr size_t CHUNK = 64;  // bytes that one compression takes in

// The fractions of the cube roots of the first 64 primes, and of the square roots of the first 8.
alignas(16) constexpr uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
constexpr uint32_t START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t load_big(const uint8_t* bytes) {
  return uint32_t(bytes[0]) << 24 | uint32_t(bytes[1]) << 16 | uint32_t(bytes[2]) << 8 | uint32_t(bytes[3]);
}

void store_big(uint32_t value, uint8_t* bytes) {
  for (int i = 0; i < 4; ++i) bytes[i] = uint8_t(value >> (24 - 8 * i));
}

void compress(uint32_t state[8], const uint8_t* chunks, size_t count) {
  for (; count; --count, chunks += CHUNK) {
    uint32_t w[64];
    for (int t = 0; t < 16; ++t) w[t] = load_big(chunks + 4 * t);
    for (int t = 16; t < 64; ++t) {
      uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int t = 0; t < 64; ++t) {
      uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      uint32_t first = h + sum1 + ((e & f) ^ (~e & g)) + ROUND[t] + w[t];
      uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      uint32_t second = sum0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first;
      d = c, c = b, b = a, a = first + second;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

#if defined(__x86_64__)
// The instructions keep the eight words as (a, b, e, f) and (c, d, g, h), highest first, and do two rounds each.
__attribute__((target("sha,sse4.1"))) void compress_accelerated(uint32_t state[8], const uint8_t* chunks,
                                                                size_t count) {
  const __m128i big = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i abcd = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i efgh = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i badc = _mm_shuffle_epi32(abcd, 0xb1), hgfe = _mm_shuffle_epi32(efgh, 0x1b);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, badc, 0xf0);
  for (; count; --count, chunks += CHUNK) {
    const __m128i old_abef = abef, old_cdgh = cdgh;
    __m128i w[4];  // the last 16 words of the schedule
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {  // four rounds each
      __m128i& now = w[i % 4];
      if (i < 4) {
        now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(chunks) + i), big);
      } else {
        const __m128i before = w[(i + 3) % 4];
        const __m128i seven_back = _mm_alignr_epi8(before, w[(i + 2) % 4], 4);
        now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) % 4]), seven_back), before);
      }
      const __m128i sum = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(ROUND) + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, old_abef);
    cdgh = _mm_add_epi32(cdgh, old_cdgh);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

bool detect_sha_instructions() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 29 & 1)) return false;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 19 & 1);  // SSE 4.1
}
#else
void compress_accelerated(uint32_t state[8], const uint8_t* chunks, size_t count) { compress(state, chunks, count); }

bool detect_sha_instructions() { return false; }
#endif

bool has_sha_instructions() {
  static const bool has = detect_sha_instructions();
  return has;
}

}  // namespace

void hash_chain(const uint8_t* parent, const uint8_t* blocks, size_t block_bytes, size_t count, bool accelerated,
                uint8_t* digests) {
  // All messages are equally long, so their end is laid out once: a 1 bit, zeros, and the length in bits.
  const size_t bytes = DIGEST_BYTES + block_bytes;
  const size_t chunks = (bytes + 8) / CHUNK + 1;
  std::vector<uint8_t> message(chunks * CHUNK);
  message[bytes] = 0x80;
  const uint64_t bits = uint64_t(bytes) * 8;
  store_big(uint32_t(bits >> 32), message.data() + message.size() - 8);
  store_big(uint32_t(bits), message.data() + message.size() - 4);

  const auto compress_chunks = accelerated && has_sha_instructions() ? compress_accelerated : compress;
  for (size_t i = 0; i < count; ++i, blocks += block_bytes, digests += DIGEST_BYTES) {
    std::memcpy(message.data(), parent, DIGEST_BYTES);
    std::memcpy(message.data() + DIGEST_BYTES, blocks, block_bytes);
    uint32_t state[8];
    std::memcpy(state, START, sizeof(state));
    compress_chunks(state, message.data(), chunks);
    for (int word = 0; word < 8; ++word) store_big(state[word], digests + 4 * word);
    parent = digests;
  }
}

}  // namespace paged_kv::manager
