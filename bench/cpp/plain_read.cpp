// What reading given pieces of memory takes at best. The C++ benchmarks link it; bench/common.py compiles it for
// itself.
#include <cstdint>
#include <cstring>

// The sum of the 64-bit words of `count` pieces of `bytes` bytes (a multiple of 256) each, read in their order.
extern "C" uint64_t read_pieces(const char* const* pieces, int64_t count, int64_t bytes, int threads) {
  typedef uint64_t Line __attribute__((vector_size(64), aligned(8)));
  constexpr int kLines = 4;  // enough independent sums to keep the loads in flight
  // The hardware sees the next lines of a piece coming, but not the next piece. So many bytes ahead and no more: a
  // whole piece ahead takes up to twice as long for pieces of 24 KiB.
  constexpr int64_t kAhead = 2048;
  uint64_t total = 0;
#pragma omp parallel for reduction(+ : total) schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) {
    Line sums[kLines] = {};
    const char *piece = pieces[i], *next = pieces[i + 1 < count ? i + 1 : i];
    for (int64_t j = 0; j < bytes; j += sizeof(sums)) {
      const char* ahead = j + kAhead < bytes ? piece + j + kAhead : next + (j + kAhead - bytes);
      for (int k = 0; k < kLines; ++k) {
        Line line;
        std::memcpy(&line, piece + j + k * sizeof(Line), sizeof(Line));
        sums[k] += line;
        __builtin_prefetch(ahead + k * sizeof(Line));
      }
    }
    for (int k = 0; k < kLines; ++k) {
      for (int word = 0; word < 8; ++word) total += sums[k][word];
    }
  }
  return total;
}
