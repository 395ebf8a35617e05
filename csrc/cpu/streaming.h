// Copies of rows and blocks. Not memcpy: for pieces of 256 bytes the call costs as much as the copy, and from 2 KiB on
// glibc's uses `rep movsb`, which on an AMD EPYC (Zen 4) moves 19 GB/s where a loop of vectors moves 38.
//
// Where more is written than the caches hold, stores go past them: a line that is to be overwritten whole is then not
// read first, which is a third of the traffic. Measured there, as a share of one memcpy of all bytes: 1.3 with such
// stores, 0.75 without.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace paged_kv::cpu {

// Whether so many bytes written would push most else out of the last-level cache, themselves included. A constant, half
// of what a core reaches on current servers: glibc tells the package's sum, here 320 MiB where a core reaches 32.
constexpr bool exceeds_caches(int64_t bytes) { return bytes > (16 << 20); }

// So many bytes at any address; the compiler makes two vectors of them where it has to.
#ifdef __AVX512F__
typedef char Wide __attribute__((vector_size(64), aligned(1), may_alias));
#else
typedef char Wide __attribute__((vector_size(32), aligned(1), may_alias));
#endif
static constexpr int64_t kWide = sizeof(Wide);
static inline Wide& wide_at(char* address) { return *reinterpret_cast<Wide*>(address); }
static inline const Wide& wide_at(const char* address) { return *reinterpret_cast<const Wide*>(address); }

// Static, as sources for several instruction sets include this.
template <bool kStream>
static inline void copy_bytes(char* to, const char* from, int64_t bytes) {
  int64_t i = 0;
#if defined(__SSE2__)
  constexpr int64_t kLine = 64;
  // A line that is stored in part goes to memory in part, which is slower than no streaming at all.
  const bool whole_lines = bytes % kLine == 0 && reinterpret_cast<uintptr_t>(to) % kLine == 0;
  if (kStream && whole_lines) {
    for (; i < bytes; i += kLine) {
      const __m128i* source = reinterpret_cast<const __m128i*>(from + i);
      __m128i* destination = reinterpret_cast<__m128i*>(to + i);
      const __m128i words[] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1), _mm_loadu_si128(source + 2),
                               _mm_loadu_si128(source + 3)};
      for (int k = 0; k < 4; ++k) _mm_stream_si128(destination + k, words[k]);
    }
    return;
  }
#endif
  for (; i + 2 * kWide <= bytes; i += 2 * kWide) {
    const Wide first = wide_at(from + i), second = wide_at(from + i + kWide);
    wide_at(to + i) = first;
    wide_at(to + i + kWide) = second;
  }
  for (; i + kWide <= bytes; i += kWide) wide_at(to + i) = wide_at(from + i);
  if (i < bytes) std::memcpy(to + i, from + i, bytes - i);
}

// Before another thread may read what copy_bytes<true> wrote.
static inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace paged_kv::cpu
