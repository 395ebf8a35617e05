// What reading given pieces of memory takes at best. The C++ benchmarks link it; bench/common.py compiles it for
// itself.
#include <cstdint>
#include <cstring>

// The sum of the 64-bit words of `count` pieces of `bytes` bytes (a multiple of 256) each, read in their order.
extern "C" uint64_t read_pieces(const char* const* pieces, int64_t count, int64_t bytes, int threads) {
  constexpr int kWords = 32;  // enough independent sums to keep the loads in flight
  uint64_t total = 0;
#pragma omp parallel for reduction(+ : total) schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) {
    uint64_t sums[kWords] = {};
    for (int64_t j = 0; j < bytes; j += sizeof(sums)) {
      uint64_t words[kWords];
      std::memcpy(words, pieces[i] + j, sizeof(words));
      if (i + 1 < count) __builtin_prefetch(pieces[i + 1] + j, 0, 2);
      for (int k = 0; k < kWords; ++k) sums[k] += words[k];
    }
    for (int k = 0; k < kWords; ++k) total += sums[k];
  }
  return total;
}
