// The CPU kernels without Python and PyTorch: `bench_cpu`, with Google Benchmark's options, of which
// --benchmark_filter,
// --benchmark_out=FILE (JSON) and --benchmark_min_time are the useful ones. OMP_NUM_THREADS sets the threads,
// PAGED_KV_ISA the instruction set.
//
// Each call of a kernel alternates with a call of its limit, the same bytes read or copied plainly; GB/s and of_limit
// are those of the medians. Every result is checked before it is timed.
#include <benchmark/benchmark.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernels.h"
#include "limits.h"
#include "work.h"

namespace {

using namespace paged_kv;
using work::Shape;

// As PyTorch's own: equal parts, no more threads than there are grains.
void parallel_for(int64_t n, int64_t grain, void (*body)(void*, int64_t, int64_t), void* arg) {
  const int64_t grains = (n + std::max<int64_t>(1, grain) - 1) / std::max<int64_t>(1, grain);
  const int threads = static_cast<int>(std::min<int64_t>(omp_get_max_threads(), grains));
  if (threads <= 1) {
    if (n > 0) body(arg, 0, n);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t part = (n + omp_get_num_threads() - 1) / omp_get_num_threads();
    const int64_t begin = omp_get_thread_num() * part, end = std::min(n, begin + part);
    if (begin < end) body(arg, begin, end);
  }
}

Context context() { return {parallel_for, omp_get_max_threads(), nullptr}; }

// Memory as PagedKVCache has it: huge pages where the system gives them.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
    data_ = static_cast<char*>(std::aligned_alloc(kHugePage, bytes_));
    madvise(data_, bytes_, MADV_HUGEPAGE);
    std::memset(data_, 0, bytes_);
  }
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return data_; }

 private:
  static constexpr int64_t kHugePage = 2 << 20;
  int64_t bytes_;
  char* data_;
};

double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// `amount`: bytes, or operations, that a call has to move or do; `unit` is the counter's name.
void run(benchmark::State& state, double amount, const char* unit, const std::function<Error()>& call,
         const std::function<void()>& limit) {
  std::vector<double> times, limits;
  limit();
  for (auto _ : state) {
    limits.push_back(seconds_of(limit));
    Error error = nullptr;
    times.push_back(seconds_of([&] { error = call(); }));
    if (error != nullptr) return state.SkipWithError(error);
    state.SetIterationTime(times.back());
  }
  state.counters[unit] = amount / median(times) / 1e9;
  state.counters["of_limit"] = median(limits) / median(times);
}

struct AttentionCase {
  Shape s;
  Memory query, keys, values, out;
  work::Batch batch;
  std::vector<float> lse;
  AttentionParams params;

  explicit AttentionCase(const Shape& shape)
      : s(shape),
        query(s.query_elements() * element_size(s.row_dtype())),
        keys(s.cache_bytes()),
        values(s.cache_bytes()),
        out(s.query_elements() * element_size(s.row_dtype())),
        batch(s),
        lse(s.num_tokens() * s.num_q_heads),
        params(work::attention_params(s, {query.data(), keys.data(), values.data(), out.data(), lse.data(),
                                          batch.tables.data(), batch.lens.data(), batch.starts.data()})) {
    work::fill_randomly(query.data(), s.row_dtype(), s.query_elements(), 1);
    work::fill_randomly(keys.data(), s.dtype, s.cache_elements(), 2);
    work::fill_randomly(values.data(), s.dtype, s.cache_elements(), 3);
  }

  // Whether the last row of the last sequence, last head, is right.
  bool is_right() const {
    const int64_t row = s.num_tokens() - 1, q_head = s.num_q_heads - 1, kv_head = s.num_kv_heads - 1;
    const int64_t q_offset = row * params.query.stride_token + q_head * params.query.stride_head;
    std::vector<double> scores(s.seq_len), sums(s.head_dim);
    const auto offset = [&](int64_t token) {
      const int64_t block = batch.tables[(s.num_seqs - 1) * s.blocks_per_seq() + token / s.block_size];
      return block * params.key_cache.stride_block + kv_head * params.key_cache.stride_head +
             token % s.block_size * params.key_cache.stride_slot;
    };
    for (int64_t token = 0; token < s.seq_len; ++token) {
      for (int64_t d = 0; d < s.head_dim; ++d) {
        scores[token] += static_cast<double>(work::element(query.data(), s.row_dtype(), q_offset + d)) *
                         work::element(keys.data(), s.dtype, offset(token) + d) * params.scale;
      }
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    double denominator = 0, error = 0, magnitude = 0;
    for (int64_t token = 0; token < s.seq_len; ++token) {
      const double weight = std::exp(scores[token] - largest);
      denominator += weight;
      for (int64_t d = 0; d < s.head_dim; ++d) {
        sums[d] += weight * work::element(values.data(), s.dtype, offset(token) + d);
      }
    }
    for (int64_t d = 0; d < s.head_dim; ++d) {
      const double expected = sums[d] / denominator;
      error = std::max(error, std::abs(expected - work::element(out.data(), s.row_dtype(), q_offset + d)));
      magnitude = std::max(magnitude, std::abs(expected));
    }
    return error <= (s.dtype == DType::kFloat32 ? 1e-5 : 2e-2) * magnitude;
  }
};

// Whole blocks in their order, keys and values in turn; where a block's heads are not neighbours in memory, one head
// after the other.
struct Pieces {
  std::vector<const char*> starts;
  int64_t bytes;  // of each
};

Pieces pieces_of(const Shape& s, const std::vector<int32_t>& table, char* keys, char* values) {
  const int64_t heads = s.runs ? s.num_kv_heads : 1;
  const CacheView view = s.cache(nullptr);
  Pieces pieces{{}, s.cache_bytes() / (s.num_blocks() * heads)};
  for (int64_t head = 0; head < heads; ++head) {
    for (const int64_t block : table) {
      const int64_t offset = (block * view.stride_block + head * view.stride_head) * element_size(s.dtype);
      pieces.starts.insert(pieces.starts.end(), {keys + offset, values + offset});
    }
  }
  return pieces;
}

// The multiply-adds of both products alone, of the kind that the kernels take.
void multiply_add(const Shape& s) {
  const bool pairs = std::string_view(cpu::backend().name) == "avx512_bf16" && s.row_dtype() == DType::kBFloat16;
  limits::multiply_add(static_cast<int64_t>(s.flops() / 2), pairs);
}

void attention(benchmark::State& state, const Shape& s) {
  AttentionCase c(s);
  const auto call = [&] { return cpu::backend().paged_attention(c.params, context()); };
  if (Error error = call()) return state.SkipWithError(error);
  if (!c.is_right()) return state.SkipWithError("the result is wrong");
  if (s.query_len == 1) {
    const Pieces pieces = pieces_of(s, c.batch.tables, c.keys.data(), c.values.data());
    run(state, 2.0 * s.cache_bytes(), "GB/s", call, [&] { limits::read(pieces.starts, pieces.bytes); });
  } else {
    run(state, s.flops(), "GFLOP/s", call, [&] { multiply_add(s); });
  }
}

// What bounds decode beside memory: the arithmetic, here with keys and values that are there already. The limit is the
// multiply-adds of both products.
void bound(benchmark::State& state, const Shape& s) {
  AttentionCase c(s);
  const auto call = [&] { return cpu::backend().paged_attention(c.params, context()); };
  if (Error error = call()) return state.SkipWithError(error);
  if (!c.is_right()) return state.SkipWithError("the result is wrong");
  run(state, s.read_bytes(), "GB/s", call, [&] { multiply_add(s); });
  state.counters["limit_GB/s"] = state.counters["GB/s"] / state.counters["of_limit"];
}

// The limit itself, in GB/s of its own.
void page_read(benchmark::State& state, const Shape& s) {
  const Memory keys(s.cache_bytes()), values(s.cache_bytes());
  const Pieces pieces = pieces_of(s, work::Batch(s).tables, keys.data(), values.data());
  const auto read = [&] { limits::read(pieces.starts, pieces.bytes); };
  run(state, 2.0 * s.cache_bytes(), "GB/s", [&]() -> Error { return read(), nullptr; }, read);
}

// Keys and values of one sequence, as packed rows and in the cache; and what a memcpy of so many bytes takes.
struct TokensCase {
  Shape s;
  int64_t bytes = 2 * s.cache_bytes();
  Memory rows, cache, from, to;
  work::Batch batch;
  std::vector<int64_t> slots;

  explicit TokensCase(const Shape& shape)
      : s(shape), rows(bytes), cache(bytes), from(bytes), to(bytes), batch(s), slots(batch.slots(s)) {
    work::fill_randomly(rows.data(), s.dtype, 2 * s.cache_elements(), 4);
  }
  // Keys before values, in each.
  work::TokensMemory memory(char* packed) const {
    return {packed, packed + bytes / 2, cache.data(), cache.data() + bytes / 2};
  }
};

// Writes tokens to their slots and gathers them again: what comes back must be what went in.
void tokens(benchmark::State& state, const Shape& s, bool timed_is_write) {
  const TokensCase c(s);
  const Memory back(c.bytes);
  const ReshapeAndCacheParams write_params = work::write_params(s, c.memory(c.rows.data()), c.slots.data());
  const GatherKvParams gather_params =
      work::gather_params(s, c.memory(back.data()), c.batch.tables.data(), c.batch.lens.data());
  const auto write = [&] { return cpu::backend().reshape_and_cache(write_params, context()); };
  const auto gather = [&] { return cpu::backend().gather_kv(gather_params, context()); };
  if (Error error = write()) return state.SkipWithError(error);
  if (Error error = gather()) return state.SkipWithError(error);
  if (std::memcmp(c.rows.data(), back.data(), c.bytes) != 0) return state.SkipWithError("the result is wrong");
  const auto limit = [&] { limits::copy(c.to.data(), c.from.data(), c.bytes); };
  if (timed_is_write) {
    run(state, c.bytes, "GB/s", write, limit);
  } else {
    run(state, c.bytes, "GB/s", gather, limit);
  }
}

// Copies num_pairs blocks of block_bytes in keys and values of kLayers layers, within a cache or between two.
void blocks(benchmark::State& state, int64_t num_pairs, int64_t block_bytes, bool runs, bool swap) {
  const int64_t num_tensors = 2 * work::kLayers, side = num_pairs * block_bytes, bytes = num_tensors * side;
  // Each tensor: the sources and then the destinations; a swap's destinations are a tensor of their own.
  const Memory cache(2 * bytes), from(bytes), to(bytes);
  work::fill_randomly(cache.data(), DType::kBFloat16, bytes, 5);
  std::vector<BlockedBytes> tensors;
  for (int64_t i = 0; i < num_tensors; ++i) {
    tensors.push_back(work::whole_blocks(cache.data() + i * 2 * side, block_bytes));
  }
  const std::vector<int64_t> mapping = work::pairs_of(num_pairs, swap ? 0 : num_pairs, runs);
  const auto call = [&]() -> Error {
    if (!swap) return cpu::backend().copy_blocks({num_tensors, num_pairs, tensors.data(), mapping.data()}, context());
    for (const BlockedBytes& source : tensors) {
      BlockedBytes destination = source;
      destination.data += side;
      if (Error error = cpu::backend().swap_blocks({num_pairs, source, destination, mapping.data()}, context())) {
        return error;
      }
    }
    return nullptr;
  };
  if (Error error = call()) return state.SkipWithError(error);
  for (const BlockedBytes& tensor : tensors) {
    for (int64_t i = 0; i < num_pairs; ++i) {
      const char* destination = tensor.data + (swap ? side : 0) + mapping[2 * i + 1] * block_bytes;
      if (std::memcmp(tensor.data + mapping[2 * i] * block_bytes, destination, block_bytes) != 0) {
        return state.SkipWithError("the result is wrong");
      }
    }
  }
  run(state, bytes, "GB/s", call, [&] { limits::copy(to.data(), from.data(), bytes); });
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)->UseManualTime()->Unit(benchmark::kMicrosecond);
}

void add_attention(const std::string& kind, const Shape& s) {
  add(kind + s.name(), [s](benchmark::State& state) { attention(state, s); });
  if (s.query_len == 1) add("page_read" + s.name(), [s](benchmark::State& state) { page_read(state, s); });
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  if (const char* isa = std::getenv("PAGED_KV_ISA"); isa && *isa && !cpu::set_isa(isa)) {
    std::fprintf(stderr, "bench_cpu: PAGED_KV_ISA: this machine does not support '%s'\n", isa);
    return 1;
  }
  benchmark::AddCustomContext("instruction set", cpu::backend().name);
  benchmark::AddCustomContext("threads", std::to_string(omp_get_max_threads()));

  for (int64_t block_size : {16, 32}) {
    add_attention("decode", {1, 32768, 1, 32, 8, 128, block_size});
    add_attention("decode", {16, 2048, 1, 32, 8, 128, block_size});
    add_attention("decode", {64, 1024, 1, 12, 12, 64, block_size});
  }
  add_attention("decode", {16, 2048, 1, 32, 8, 128, 32, DType::kFloat32});
  add_attention("decode", {16, 2048, 1, 32, 8, 128, 32, DType::kBFloat16, true});
  add_attention("decode", {1, 64, 1, 32, 8, 128, 16});
  add_attention("prefill", {1, 1024, 1024, 32, 8, 128, 32});
  add_attention("chunk", {1, 4096, 256, 32, 8, 128, 32});

  // Four query heads a key/value head, for each dtype of a cache: keys and values in L1 (one block), in L2, in memory,
  // and a plain read of the latter. The same bytes take the same multiply-adds in each.
  for (DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
    const std::string of = std::string("/") + work::name_of(dtype);
    const Shape in_memory{16, 2048, 1, 32, 8, 128, 32, dtype};
    Shape in_l1{1, 16384, 1, 4, 1, 128, 16, dtype}, in_l2 = in_l1;
    in_l1.distinct_tokens = in_l1.block_size;
    in_l2.distinct_tokens = (256 << 10) / (2 * in_l2.head_dim * element_size(dtype));
    add("bound/L1" + of, [=](benchmark::State& state) { bound(state, in_l1); });
    add("bound/L2" + of, [=](benchmark::State& state) { bound(state, in_l2); });
    add("bound/memory" + of, [=](benchmark::State& state) { bound(state, in_memory); });
    add("bound/page_read" + of, [=](benchmark::State& state) { page_read(state, in_memory); });
  }

  for (int64_t num_tokens : {1024, 8192, 65536}) {
    const Shape s{1, num_tokens, num_tokens, 8, 8, 128, 16};
    add("write/" + std::to_string(num_tokens), [s](benchmark::State& state) { tokens(state, s, true); });
    add("gather/" + std::to_string(num_tokens), [s](benchmark::State& state) { tokens(state, s, false); });
  }
  for (bool runs : {false, true}) {
    for (bool swap : {false, true}) {
      for (int64_t num_pairs : {64, 256}) {
        const std::string name = std::string(swap ? "swap/" : "copy/") + std::to_string(num_pairs) +
                                 "_blocks/32_layers/" + (runs ? "runs" : "scattered");
        add(name, [=](benchmark::State& state) { blocks(state, num_pairs, 16 * 8 * 128 * 2, runs, swap); });
      }
    }
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
