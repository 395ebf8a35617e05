// Twin of <immintrin.h>, put first on the include path of a test build: AVX-512 kernels on a machine that has only
// AVX2. SIMDe (https://github.com/simd-everywhere/simde) says what each instruction does; what it lacks, and masked
// loads and stores, which must not touch a byte outside of the mask, are written out here.
#pragma once

#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512/abs.h>
#include <simde/x86/avx512/cast.h>
#include <simde/x86/avx512/cvt.h>
#include <simde/x86/avx512/dpbf16.h>
#include <simde/x86/avx512/dpwssd.h>
#include <simde/x86/avx512/fmadd.h>
#include <simde/x86/avx512/madd.h>
#include <simde/x86/avx512/max.h>
#include <simde/x86/avx512/min.h>
#include <simde/x86/avx512/permutex2var.h>
#include <simde/x86/avx512/shuffle.h>
#include <simde/x86/avx512/test.h>
#include <simde/x86/avx512/unpackhi.h>
#include <simde/x86/avx512/unpacklo.h>

#include <cstdint>
#include <cstring>

namespace emulation {

template <class Vector, class Element>
inline Vector load(uint32_t mask, const void* memory) {
  Element lanes[sizeof(Vector) / sizeof(Element)]{};
  for (size_t i = 0; i < sizeof(Vector) / sizeof(Element); ++i) {
    if (mask >> i & 1) std::memcpy(lanes + i, static_cast<const Element*>(memory) + i, sizeof(Element));
  }
  Vector v;
  std::memcpy(&v, lanes, sizeof(v));
  return v;
}

template <class Vector, class Element>
inline void store(void* memory, uint32_t mask, Vector v) {
  Element lanes[sizeof(Vector) / sizeof(Element)];
  std::memcpy(lanes, &v, sizeof(v));
  for (size_t i = 0; i < sizeof(Vector) / sizeof(Element); ++i) {
    if (mask >> i & 1) std::memcpy(static_cast<Element*>(memory) + i, lanes + i, sizeof(Element));
  }
}

inline simde__m512 from_half(uint32_t mask, __m256i halves) {
  __m256 parts[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                     _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  return load<simde__m512, float>(mask, parts);
}

template <int kRounding>
inline __m256i to_half(uint32_t mask, simde__m512 v) {
  __m256 parts[2];
  std::memcpy(parts, &v, sizeof(v));
  const __m128i halves[2] = {_mm256_cvtps_ph(parts[0], kRounding & 7), _mm256_cvtps_ph(parts[1], kRounding & 7)};
  return load<__m256i, uint16_t>(mask, halves);
}

inline simde__m512i join(__m256i low, __m256i high) {
  const __m256i parts[2] = {low, high};
  simde__m512i v;
  std::memcpy(&v, parts, sizeof(v));
  return v;
}

inline simde__m512i widen_int8(__m128i v) {
  return join(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)));
}

inline simde__m512i widen_uint8(__m256i v) {
  return join(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(v)), _mm256_cvtepu8_epi16(_mm256_extracti128_si256(v, 1)));
}

// Rounds to nearest even; subnormals become zero, and NaN quiet.
inline __m256i to_bfloat16(simde__m512 v) {
  uint32_t lanes[16];
  uint16_t words[16];
  std::memcpy(lanes, &v, sizeof(v));
  for (int i = 0; i < 16; ++i) {
    uint32_t raw = lanes[i];
    const uint32_t magnitude = raw & 0x7fffffff;
    if (magnitude > 0x7f800000) {
      raw |= 0x400000;
    } else if (magnitude < 0x00800000) {
      raw &= 0x80000000;
    } else {
      raw += 0x7fff + (raw >> 16 & 1);
    }
    words[i] = static_cast<uint16_t>(raw >> 16);
  }
  __m256i result;
  std::memcpy(&result, words, sizeof(result));
  return result;
}

}  // namespace emulation

#undef _mm512_maskz_loadu_epi32
#undef _mm512_maskz_loadu_epi16
#undef _mm256_maskz_loadu_epi16
#undef _mm256_maskz_loadu_epi8
#undef _mm_maskz_loadu_epi8
#undef _mm512_mask_storeu_epi32
#undef _mm256_mask_storeu_epi16
#undef _mm_mask_storeu_epi8
#undef _mm512_maskz_cvtph_ps
#undef _mm512_maskz_cvtps_ph
#define _mm512_maskz_loadu_epi32(mask, memory) emulation::load<simde__m512i, uint32_t>(mask, memory)
#define _mm512_maskz_loadu_epi16(mask, memory) emulation::load<simde__m512i, uint16_t>(mask, memory)
#define _mm256_maskz_loadu_epi16(mask, memory) emulation::load<__m256i, uint16_t>(mask, memory)
#define _mm256_maskz_loadu_epi8(mask, memory) emulation::load<__m256i, uint8_t>(mask, memory)
#define _mm_maskz_loadu_epi8(mask, memory) emulation::load<__m128i, uint8_t>(mask, memory)
#define _mm512_mask_storeu_epi32(memory, mask, v) emulation::store<simde__m512i, uint32_t>(memory, mask, v)
#define _mm256_mask_storeu_epi16(memory, mask, v) emulation::store<__m256i, uint16_t>(memory, mask, v)
#define _mm_mask_storeu_epi8(memory, mask, v) emulation::store<__m128i, uint8_t>(memory, mask, v)
#define _mm512_cvtepi8_epi32(v) emulation::widen_int8(v)
#define _mm512_cvtepu8_epi16(v) emulation::widen_uint8(v)
#define _mm512_maskz_cvtph_ps(mask, v) emulation::from_half(mask, v)
#define _mm512_cvtneps_pbh(v) emulation::to_bfloat16(v)
#define _mm512_maskz_cvtps_ph(mask, v, rounding) emulation::to_half<rounding>(mask, v)

// What the kernels ask the compiler for.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#ifdef PAGED_KV_EMULATE_BF16
#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1
#endif
