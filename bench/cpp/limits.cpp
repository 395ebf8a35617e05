#include "limits.h"

#include <benchmark/benchmark.h>
#include <omp.h>

#include <algorithm>
#include <cstring>

extern "C" uint64_t read_pieces(const char* const* pieces, int64_t count, int64_t bytes, int threads);

namespace limits {

void read(const std::vector<const char*>& pieces, int64_t piece_bytes) {
  const int64_t count = static_cast<int64_t>(pieces.size());
  benchmark::DoNotOptimize(read_pieces(pieces.data(), count, piece_bytes, omp_get_max_threads()));
}

void copy(char* to, const char* from, int64_t bytes) {
#pragma omp parallel
  {
    const int64_t part = (bytes / omp_get_num_threads() + 63) / 64 * 64;
    const int64_t begin = std::min(bytes, part * omp_get_thread_num());
    std::memcpy(to + begin, from + begin, std::min(part, bytes - begin));
  }
}

void multiply_add(int64_t count) {
#ifdef __AVX512F__
  constexpr int kWidth = 16;
#else
  constexpr int kWidth = 8;
#endif
  typedef float Vec __attribute__((vector_size(4 * kWidth)));
  constexpr int kChains = 10;  // covers the latency of a multiply-add, of which two start each cycle
#pragma omp parallel
  {
    Vec sums[kChains] = {}, factor = Vec{} + 1.0000001f, term = Vec{} + 1e-7f;
    benchmark::DoNotOptimize(factor);
    benchmark::DoNotOptimize(term);
    for (int64_t left = count / omp_get_num_threads(); left > 0; left -= kChains * kWidth) {
      for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * factor + term;
    }
    for (int i = 0; i < kChains; ++i) benchmark::DoNotOptimize(sums[i]);
  }
}

}  // namespace limits
