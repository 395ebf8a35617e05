// A vector of floats as wide as the instruction set this source is compiled for, and what kernels need of it: element
// conversions on load and store, reductions, exp and tanh. Arithmetic and comparison are the compiler's own operators
// on vector types (a < b ? x : y selects by lane); intrinsics stand only where these do not reach, here, in
// streaming.h and in attention_*.h, and come from <immintrin.h> alone, so that a test build can put a twin first.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "arch/registers.h"
#include "cpu/elements.h"

#define PAGED_KV_INLINE inline __attribute__((always_inline))

namespace paged_kv::cpu::PAGED_KV_ISA {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PAGED_KV_WIDTH 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PAGED_KV_WIDTH 8
#else
#define PAGED_KV_WIDTH 4
#endif

inline constexpr int kWidth = PAGED_KV_WIDTH;  // floats in a vector

typedef float Vec __attribute__((vector_size(4 * kWidth), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kWidth), may_alias));
typedef uint32_t UintVec __attribute__((vector_size(4 * kWidth), may_alias));
typedef uint16_t Uint16Vec __attribute__((vector_size(2 * kWidth), may_alias));
typedef int16_t Int16Vec __attribute__((vector_size(2 * kWidth), may_alias));
typedef uint8_t Uint8Vec __attribute__((vector_size(kWidth), may_alias));
typedef int8_t Int8Vec __attribute__((vector_size(kWidth), may_alias));

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// ---------------------------------------------------------------------------------------------------------------
// Values

PAGED_KV_INLINE Vec splat(float x) { return x - Vec{}; }  // x - 0 keeps the sign of zero, x + 0 would not
PAGED_KV_INLINE UintVec splat(uint32_t x) { return x - UintVec{}; }

PAGED_KV_INLINE UintVec bits_of(Vec v) { return reinterpret_cast<UintVec>(v); }
PAGED_KV_INLINE Vec from_bits(UintVec v) { return reinterpret_cast<Vec>(v); }

// v, in a register where those are few.
template <class V>
PAGED_KV_INLINE V keep(V v) {
#if PAGED_KV_WIDTH == 8
  return keep_in_register(v);
#else
  return v;
#endif
}

// 0, 1, 2, ...
PAGED_KV_INLINE IntVec iota() {
#if PAGED_KV_WIDTH == 16
  return IntVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif PAGED_KV_WIDTH == 8
  return IntVec{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return IntVec{0, 1, 2, 3};
#endif
}

// a * b + c
PAGED_KV_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if PAGED_KV_WIDTH == 16
  return _mm512_fmadd_ps(a, b, c);
#elif PAGED_KV_WIDTH == 8
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The larger; b where one of them is NaN.
PAGED_KV_INLINE Vec max(Vec a, Vec b) {
  // GCC does not always see it in a comparison and a choice.
#if PAGED_KV_WIDTH == 16
  return _mm512_maskz_max_ps(0xffff, a, b);
#elif PAGED_KV_WIDTH == 8
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// The smaller; b where one of them is NaN.
PAGED_KV_INLINE Vec min(Vec a, Vec b) {
#if PAGED_KV_WIDTH == 16
  return _mm512_maskz_min_ps(0xffff, a, b);
#elif PAGED_KV_WIDTH == 8
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

PAGED_KV_INLINE Vec abs(Vec v) { return from_bits(bits_of(v) & 0x7fffffffu); }

// ---------------------------------------------------------------------------------------------------------------
// Bytes in and out of registers

namespace detail {

// Copies fewer than kLimit bytes, a power of two, without a call and without touching a byte more.
template <int kLimit>
PAGED_KV_INLINE void copy_some(void* to, const void* from, int bytes) {
  if constexpr (kLimit > 1) {
    constexpr int kPiece = kLimit / 2;
    if (bytes & kPiece) std::memcpy(to, from, kPiece);
    const int done = bytes & kPiece;
    copy_some<kPiece>(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, bytes - done);
  }
}

// The first `count` elements of V at p, zero in the other lanes.
template <class V>
PAGED_KV_INLINE V load_bits(const void* p, int count) {
  V v{};
  constexpr int kSize = sizeof(V) / kWidth;
  if (count == kWidth) {
    std::memcpy(&v, p, sizeof(V));
    return v;
  }
#if PAGED_KV_WIDTH == 16
  const uint32_t mask = (1u << count) - 1;
  if constexpr (kSize == 4) {
    return reinterpret_cast<V>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), p));
  } else if constexpr (kSize == 2) {
    return reinterpret_cast<V>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p));
  } else {
    return reinterpret_cast<V>(_mm_maskz_loadu_epi8(static_cast<__mmask16>(mask), p));
  }
#elif PAGED_KV_WIDTH == 8
  if constexpr (kSize == 4) {
    const __m256i mask = reinterpret_cast<__m256i>(iota() < count - IntVec{});
    return reinterpret_cast<V>(_mm256_maskload_epi32(static_cast<const int*>(p), mask));
  }
#endif
  copy_some<sizeof(V)>(&v, p, count * kSize);
  return v;
}

// Writes the first `count` elements of v to p.
template <class V>
PAGED_KV_INLINE void store_bits(void* p, V v, int count) {
  constexpr int kSize = sizeof(V) / kWidth;
  if (count == kWidth) {
    std::memcpy(p, &v, sizeof(V));
    return;
  }
#if PAGED_KV_WIDTH == 16
  const uint32_t mask = (1u << count) - 1;
  if constexpr (kSize == 4) {
    return _mm512_mask_storeu_epi32(p, static_cast<__mmask16>(mask), reinterpret_cast<__m512i>(v));
  } else if constexpr (kSize == 2) {
    return _mm256_mask_storeu_epi16(p, static_cast<__mmask16>(mask), reinterpret_cast<__m256i>(v));
  } else {
    return _mm_mask_storeu_epi8(p, static_cast<__mmask16>(mask), reinterpret_cast<__m128i>(v));
  }
#elif PAGED_KV_WIDTH == 8
  if constexpr (kSize == 4) {
    const __m256i mask = reinterpret_cast<__m256i>(iota() < count - IntVec{});
    return _mm256_maskstore_epi32(static_cast<int*>(p), mask, reinterpret_cast<__m256i>(v));
  }
#endif
  copy_some<sizeof(V)>(p, &v, count * kSize);
}

// ---------------------------------------------------------------------------------------------------------------
// Small floats, for any format with kExponent and kMantissa bits, as integer arithmetic on float32

// Float32 from the low bits of each lane. The subnormals come from a subtraction of normal numbers, so that they
// survive a thread that flushes float32 subnormals to zero.
template <int kExponent, int kMantissa>
PAGED_KV_INLINE Vec widen(UintVec raw) {
  constexpr uint32_t kAbs = (1u << (kExponent + kMantissa)) - 1;
  constexpr uint32_t kRebias = (127 - ((1 << (kExponent - 1)) - 1)) << 23;
  const UintVec magnitude = (raw & kAbs) << (23 - kMantissa);
  const UintVec sign = (raw & (kAbs + 1)) << (31 - kExponent - kMantissa);
  const UintVec normal = magnitude + kRebias;
  constexpr uint32_t kOne = 1u << 23;  // one step of the exponent
  const Vec smallest_normal = from_bits(splat(kRebias + kOne));
  const UintVec subnormal = bits_of(from_bits(magnitude + (kRebias + kOne)) - smallest_normal);
  UintVec result = magnitude < kOne ? subnormal : normal;
  if constexpr (kExponent == 4) {  // e4m3fn: only all ones is NaN
    result = (raw & kAbs) == kAbs ? splat(0x7fc00000u) : result;
  } else {
    result = (raw & kAbs) >= (((1u << kExponent) - 1) << kMantissa) ? (magnitude | 0x7f800000u) : result;
  }
  return from_bits(result | sign);
}

// The nearest number of the format, ties to even, in the low bits of each lane; NaN gives the NaN of all ones. The
// caller has clamped what would overflow.
template <int kExponent, int kMantissa>
PAGED_KV_INLINE UintVec narrow(Vec v) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr int kShift = 23 - kMantissa;
  const UintVec sign = (bits_of(v) >> 31) << (kExponent + kMantissa);
  const UintVec magnitude = bits_of(v) & 0x7fffffffu;
  const UintVec odd = (magnitude >> kShift) & 1u;
  const UintVec normal =
      ((magnitude + ((1u << (kShift - 1)) - 1) + odd) >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
  // Adding a number whose last bit is worth the format's smallest subnormal rounds as the hardware rounds.
  constexpr uint32_t kAligner = static_cast<uint32_t>(127 + 1 - kBias - kMantissa + 23) << 23;
  const UintVec subnormal = bits_of(from_bits(magnitude) + from_bits(splat(kAligner))) - kAligner;
  UintVec result = magnitude < (static_cast<uint32_t>(127 + 1 - kBias) << 23) ? subnormal : normal;
  result = magnitude > 0x7f800000u ? splat((1u << (kExponent + kMantissa)) - 1) : result;
  return result | sign;
}

// The low byte of each lane.
PAGED_KV_INLINE Uint8Vec low_bytes(UintVec v) {
#if PAGED_KV_WIDTH == 16
  return __builtin_convertvector(v, Uint8Vec);
#else
  return __builtin_convertvector(__builtin_convertvector(v, Uint16Vec), Uint8Vec);  // as in load(const int8_t*)
#endif
}

// v within [-largest, largest], NaN kept.
PAGED_KV_INLINE Vec clamp(Vec v, float largest) { return max(splat(-largest), min(splat(largest), v)); }

// Floats from float16. The masked form of the AVX-512 conversion, because GCC 12 takes the plain one's ignored operand
// for uninitialised.
PAGED_KV_INLINE Vec from_halves(Uint16Vec halves) {
#if PAGED_KV_WIDTH == 16
  return _mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(halves));
#elif PAGED_KV_WIDTH == 8
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(halves));
#else
  return widen<5, 10>(__builtin_convertvector(halves, UintVec));
#endif
}

// What a float8 is as a float16: the upper and the lower byte. Vectors of bytes have no shifts, so these shift pairs of
// bytes and mask what crosses over.
template <class Bytes>
struct HalfBytes {
  Bytes high, low;
};

// e5m2 is the upper byte itself.
template <class Bytes>
PAGED_KV_INLINE HalfBytes<Bytes> half_bytes(Float8E5M2, Bytes bytes) {
  return {bytes, Bytes{}};
}

// An e4m3 of s eeee mmm becomes a float16 of 1 / kE4M3PerHalf its value, subnormals included: s 0eeee mmm0000000, since
// only the bias differs. The upper byte is the byte less half of its magnitude, rounded up; for NaN, the magnitude of
// all ones, that half has a bit more than any other, and without it nothing is subtracted: again all ones.
inline constexpr float kE4M3PerHalf = 256.0f;

template <class Bytes>
PAGED_KV_INLINE HalfBytes<Bytes> half_bytes(Float8E4M3, Bytes bytes) {
  typedef uint16_t Pairs __attribute__((vector_size(sizeof(Bytes))));
  const Pairs magnitude_and_one = reinterpret_cast<Pairs>((bytes & uint8_t{0x7f}) + uint8_t{1});
  const Pairs lowest = reinterpret_cast<Pairs>(bytes) << 7;
  return {bytes - (reinterpret_cast<Bytes>(magnitude_and_one >> 1) & uint8_t{0x3f}),
          reinterpret_cast<Bytes>(lowest) & uint8_t{0x80}};
}

// kWidth floats from as many float8, those of e4m3 in units of 1 / kE4M3PerHalf.
template <class T>
PAGED_KV_INLINE Vec from_float8(T format, Uint8Vec bytes) {
  const auto [high, low] = half_bytes(format, bytes);
  return from_halves(__builtin_convertvector(high, Uint16Vec) << 8 | __builtin_convertvector(low, Uint16Vec));
}

}  // namespace detail

// ---------------------------------------------------------------------------------------------------------------
// load(p): kWidth elements as floats. load(p, n): the first n, 0 <= n <= kWidth, and zeros; reads nothing beyond.

PAGED_KV_INLINE Vec load(const float* p, int count = kWidth) { return detail::load_bits<Vec>(p, count); }

PAGED_KV_INLINE Vec load(const BFloat16* p, int count = kWidth) {
  return from_bits(__builtin_convertvector(detail::load_bits<Uint16Vec>(p, count), UintVec) << 16);
}

PAGED_KV_INLINE Vec load(const Float16* p, int count = kWidth) {
  return detail::from_halves(detail::load_bits<Uint16Vec>(p, count));
}

PAGED_KV_INLINE Vec load(const Float8E5M2* p, int count = kWidth) {
  return detail::from_float8(Float8E5M2{}, detail::load_bits<Uint8Vec>(p, count));
}

PAGED_KV_INLINE Vec load(const Float8E4M3* p, int count = kWidth) {
  return detail::from_float8(Float8E4M3{}, detail::load_bits<Uint8Vec>(p, count)) * detail::kE4M3PerHalf;
}

PAGED_KV_INLINE Vec load(const int8_t* p, int count = kWidth) {
  const auto bytes = detail::load_bits<Int8Vec>(p, count);
#if PAGED_KV_WIDTH == 8
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(reinterpret_cast<int64_t>(bytes))));
#elif PAGED_KV_WIDTH == 16
  return __builtin_convertvector(reinterpret_cast<IntVec>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(bytes))), Vec);
#else
  // By way of 16 bits, because GCC 12 takes the lanes apart one by one where a conversion skips a width.
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, Int16Vec), IntVec), Vec);
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// store(p, v): rounds to nearest even and writes kWidth elements. store(p, v, n): the first n. Float formats overflow
// to infinity as IEEE does; fp8 and int8 clamp to their largest finite value, and NaN is NaN in fp8 and 0 in int8.

PAGED_KV_INLINE void store(float* p, Vec v, int count = kWidth) { detail::store_bits(p, v, count); }

// The bfloat16 nearest to each float, in the low half of the lane.
PAGED_KV_INLINE UintVec bfloat16_bits(Vec v) {
  const UintVec raw = bits_of(v);
  const UintVec rounded = raw + 0x7fffu + ((raw >> 16) & 1u);
  return (v == v ? rounded : (raw | 0x400000u)) >> 16;
}

PAGED_KV_INLINE void store(BFloat16* p, Vec v, int count = kWidth) {
  detail::store_bits(p, __builtin_convertvector(bfloat16_bits(v), Uint16Vec), count);
}

PAGED_KV_INLINE void store(Float16* p, Vec v, int count = kWidth) {
#if PAGED_KV_WIDTH == 16
  const auto raw = reinterpret_cast<Uint16Vec>(_mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
#elif PAGED_KV_WIDTH == 8
  const auto raw = reinterpret_cast<Uint16Vec>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  // 65520 is the first float that rounds to infinity; both give infinity's bits under narrow.
  const Vec bounded = detail::clamp(v, 65520.0f);
  const auto raw = __builtin_convertvector(detail::narrow<5, 10>(bounded), Uint16Vec);
#endif
  detail::store_bits(p, raw, count);
}

PAGED_KV_INLINE void store(Float8E4M3* p, Vec v, int count = kWidth) {
  const UintVec raw = detail::narrow<4, 3>(detail::clamp(v, 448.0f));
  detail::store_bits(p, detail::low_bytes(raw), count);
}

PAGED_KV_INLINE void store(Float8E5M2* p, Vec v, int count = kWidth) {
  const UintVec raw = detail::narrow<5, 2>(detail::clamp(v, 57344.0f));
  detail::store_bits(p, detail::low_bytes(raw), count);
}

PAGED_KV_INLINE void store(int8_t* p, Vec v, int count = kWidth) {
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction
  const Vec rounded = (detail::clamp(v, 127.0f) + kToInteger) - kToInteger;
  const IntVec integer = __builtin_convertvector(v == v ? rounded : splat(0.0f), IntVec);
  detail::store_bits(p, detail::low_bytes(reinterpret_cast<UintVec>(integer)), count);
}

// ---------------------------------------------------------------------------------------------------------------
// Reductions

namespace detail {

// Two vectors of one width, V, as one: in each group of four lanes, lanes kA0 and kA1 of a, then kB0 and kB1 of b.
template <int kA0, int kA1, int kB0, int kB1, class V>
PAGED_KV_INLINE V shuffle(V a, V b) {
#if PAGED_KV_WIDTH == 16
  return V(_mm512_shuffle_ps(Vec(a), Vec(b), kA0 | kA1 << 2 | kB0 << 4 | kB1 << 6));
#elif PAGED_KV_WIDTH == 8
  return V(_mm256_shuffle_ps(Vec(a), Vec(b), kA0 | kA1 << 2 | kB0 << 4 | kB1 << 6));
#else
  return __builtin_shufflevector(a, b, kA0, kA1, 4 + kB0, 4 + kB1);
#endif
}

// The same with lanes 0 and 1 of a, and lanes 2 and 3 of b, which is cheaper than a shuffle.
template <class V>
PAGED_KV_INLINE V outer_pairs(V a, V b) {
#if PAGED_KV_WIDTH == 16
  return __builtin_shufflevector(a, b, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31);
#elif PAGED_KV_WIDTH == 8
  return V(_mm256_blend_ps(Vec(a), Vec(b), 0xcc));
#else
  return shuffle<0, 1, 2, 3>(a, b);
#endif
}

// In each group of four lanes: f over lanes i and i + 2 of a, then of b.
template <class V, class F>
PAGED_KV_INLINE V reduce_halves(V a, V b, F f) {
  return f(outer_pairs(a, b), shuffle<2, 3, 0, 1>(a, b));
}

#if PAGED_KV_WIDTH == 16
// f of the groups of four lanes 2i and 2i + 1 of a, then of b.
template <class V, class F>
PAGED_KV_INLINE V reduce_neighbour_quads(V a, V b, F f) {
  // Not _mm512_shuffle_f32x4, whose ignored operand GCC 12 takes for uninitialised.
  return f(__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
}
#endif

// Lane i of the result is f over the lanes of v[i], where halves[i] = reduce_halves(v[2 * i], v[2 * i + 1]). A tree,
// the same for every i.
template <class V, class F>
PAGED_KV_INLINE V reduce_each_half(const V (&halves)[kWidth / 2], F f) {
  V quads[kWidth / 4];
  for (int i = 0; i < kWidth / 4; ++i) {
    const V ab = halves[2 * i], cd = halves[2 * i + 1];
    quads[i] = f(shuffle<0, 2, 0, 2>(ab, cd), shuffle<1, 3, 1, 3>(ab, cd));
  }
#if PAGED_KV_WIDTH == 16
  return reduce_neighbour_quads(reduce_neighbour_quads(quads[0], quads[1], f),
                                reduce_neighbour_quads(quads[2], quads[3], f), f);
#elif PAGED_KV_WIDTH == 8
  const Vec a = Vec(quads[0]), b = Vec(quads[1]);
  return f(V(_mm256_blend_ps(a, b, 0xf0)), V(_mm256_permute2f128_ps(a, b, 0x21)));
#else
  return quads[0];
#endif
}

template <class V, class F>
PAGED_KV_INLINE V reduce_each(const V (&v)[kWidth], F f) {
  V halves[kWidth / 2];
  for (int i = 0; i < kWidth / 2; ++i) halves[i] = reduce_halves(v[2 * i], v[2 * i + 1], f);
  return reduce_each_half(halves, f);
}

struct Add {
  template <class V>
  PAGED_KV_INLINE V operator()(V a, V b) const {
    return a + b;
  }
};

}  // namespace detail

// The first step of sum_each for two of its vectors, and the rest of it.
template <class V>
PAGED_KV_INLINE V sum_halves(V a, V b) {
  return detail::reduce_halves(a, b, detail::Add());
}
template <class V>
PAGED_KV_INLINE V sum_each_half(const V (&halves)[kWidth / 2]) {
  return detail::reduce_each_half(halves, detail::Add());
}

// sums[i] = the sum over the lanes of v[i], for kWidth vectors of floats or integers at once.
template <class V>
PAGED_KV_INLINE V sum_each(const V (&v)[kWidth]) {
  return detail::reduce_each(v, detail::Add());
}

// The largest lane of each of kWidth vectors; no lane may be NaN.
PAGED_KV_INLINE Vec max_each(const Vec (&v)[kWidth]) {
  return detail::reduce_each(v, [](Vec a, Vec b) __attribute__((always_inline)) { return max(a, b); });
}

namespace detail {

// Lane i of the result is lane i ^ kBit of v.
template <int kBit, int... kLanes>
PAGED_KV_INLINE Vec exchange(Vec v, std::integer_sequence<int, kLanes...>) {
  return __builtin_shufflevector(v, v, (kLanes ^ kBit)...);
}

template <int kBit = kWidth / 2, class F>
PAGED_KV_INLINE Vec fold(Vec v, F f) {
  if constexpr (kBit == 0) {
    return v;
  } else {
    return fold<kBit / 2>(f(v, exchange<kBit>(v, std::make_integer_sequence<int, kWidth>{})), f);
  }
}

}  // namespace detail

PAGED_KV_INLINE float reduce_add(Vec v) {
  return detail::fold(v, [](Vec a, Vec b) __attribute__((always_inline)) { return a + b; })[0];
}

// The largest lane; no lane may be NaN.
PAGED_KV_INLINE float reduce_max(Vec v) {
  return detail::fold(v, [](Vec a, Vec b) __attribute__((always_inline)) { return max(a, b); })[0];
}

// Whether any lane of a comparison's result holds.
PAGED_KV_INLINE bool any(IntVec mask) {
  auto either = [](Vec a, Vec b) __attribute__((always_inline)) { return from_bits(bits_of(a) | bits_of(b)); };
  return bits_of(detail::fold(reinterpret_cast<Vec>(mask), either))[0] != 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Functions

namespace detail {

PAGED_KV_INLINE Vec zero_if(IntVec mask, Vec v) {
#if PAGED_KV_WIDTH == 16
  return mask ? Vec{} : v;  // part of the instruction before
#else
  return from_bits(bits_of(v) & ~reinterpret_cast<UintVec>(mask));
#endif
}

}  // namespace detail

// e^x within 1.1 ulp for x <= 88; NaN for NaN, and 0 for -inf alone: below -87.3 it stays at the smallest normal
// number, so that the weight of a finite score times an infinite value is infinite, as in exact arithmetic, and never
// NaN.
PAGED_KV_INLINE Vec exp(Vec x) {
  constexpr float kLowest = -87.33654f;
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  const Vec bounded = max(splat(kLowest), x);
  const Vec shifted = fma(bounded, splat(1.44269504f), splat(kToInteger));
  const Vec n = shifted - kToInteger;
  // ln 2 in two parts, so that n * ln 2 is exact to beyond float32. (Cody and Waite.)
  Vec r = fma(n, splat(-0.693359375f), bounded);
  r = fma(n, splat(2.12194440e-4f), r);
  // Minimax polynomial of (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2]. (Cephes, expf.) By pairs of terms, since what
  // limits a loop of exponentials is how many of their chains of dependent operations are in flight.
  const Vec square = r * r;
  const Vec high = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  const Vec middle = fma(splat(8.3334519073e-3f), r, splat(4.1665795894e-2f));
  const Vec low = fma(splat(1.6666665459e-1f), r, splat(5.0000001201e-1f));
  const Vec p = fma(fma(fma(high, square, middle), square, low), square, r);
  // Multiplied, where adding to the exponent would do for numbers, so that NaN stays NaN.
  const Vec power = from_bits((bits_of(shifted) << 23) + 0x3f800000u);
  return detail::zero_if(x == -kInfinity, fma(p, power, power));
}

// 2^x within 2.3 ulp for x < 128, in few operations: their number limits where many are in flight. NaN for NaN, 0 for
// -inf alone, and no less than the smallest normal number for others, as there.
PAGED_KV_INLINE Vec exp2(Vec x) {
  constexpr float kToInteger = 12582912.0f;
  const Vec bounded = max(splat(-126.0f), x);
  const Vec shifted = bounded + kToInteger;
  const Vec r = bounded - (shifted - kToInteger);
  // Minimax polynomial of (2^r - 1) / r on [-1/2, 1/2], of the relative error of 2^r.
  Vec p = fma(splat(1.3264727313e-3f), r, splat(9.6715129912e-3f));
  p = fma(p, r, splat(5.5507335812e-2f));
  p = fma(p, r, splat(2.4022242427e-1f));
  p = fma(p, r, splat(6.9314700365e-1f));
  const Vec power = from_bits((bits_of(shifted) << 23) + 0x3f800000u);
  return detail::zero_if(x == -kInfinity, fma(p, power * r, power));
}

// tanh within 2 ulp, near zero too, where the quotient of exponentials would lose all digits. (Cephes, tanhf.)
PAGED_KV_INLINE Vec tanh(Vec x) {
  const Vec magnitude = abs(x);
  const Vec square = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  const Vec near = fma(p * square, x, x);
  const Vec bounded = min(splat(20.0f), magnitude);  // tanh(20) rounds to 1
  const Vec far = 1.0f - 2.0f / (exp(bounded + bounded) + 1.0f);
  const Vec signed_far = from_bits(bits_of(far) | (bits_of(x) & 0x80000000u));
  return magnitude < 0.625f ? near : signed_far;
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
