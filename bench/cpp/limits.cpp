#include "limits.h"

#include <benchmark/benchmark.h>
#include <omp.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

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

namespace {

#ifdef __AVX512F__
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif
typedef float Vec __attribute__((vector_size(4 * kWidth)));

// Calls step(sum) for as many sums as cover the latency of a multiply-add, of which two start each cycle, `steps` times
// in all.
template <class Step>
void run_chains(int64_t steps, Step step) {
  constexpr int kChains = 12;
#pragma omp parallel firstprivate(step)
  {
    Vec sums[kChains] = {};
    for (int i = 0; i < kChains; ++i) benchmark::DoNotOptimize(sums[i]);  // lest equal chains become one
    for (int64_t left = steps / omp_get_num_threads(); left > 0; left -= kChains) {
      for (int i = 0; i < kChains; ++i) sums[i] = step(sums[i]);
    }
    for (int i = 0; i < kChains; ++i) benchmark::DoNotOptimize(sums[i]);
  }
}

}  // namespace

void multiply_add(int64_t count, bool bfloat16_pairs) {
  Vec factor = Vec{} + 1.0000001f, term = Vec{} + 1e-7f;
  benchmark::DoNotOptimize(factor);
  benchmark::DoNotOptimize(term);
#ifdef __AVX512BF16__
  if (bfloat16_pairs) {
    const auto pairs = reinterpret_cast<__m512bh>(factor);
    return run_chains(count / (2 * kWidth), [=](Vec sum) { return _mm512_dpbf16_ps(sum, pairs, pairs); });
  }
#endif
  run_chains(count / kWidth, [=](Vec sum) { return sum * factor + term; });
}

}  // namespace limits
