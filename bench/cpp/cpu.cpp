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
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "limits.h"

namespace {

using namespace paged_kv;

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

struct Shape {
  int64_t num_seqs, seq_len, query_len, num_q_heads, num_kv_heads, head_dim, block_size;
  DType dtype = DType::kBFloat16;
  bool runs = false;  // neighbouring blocks in the head-major layout, instead of scattered ones

  int64_t blocks_per_seq() const { return (seq_len + block_size - 1) / block_size; }
  int64_t num_blocks() const { return num_seqs * blocks_per_seq(); }
  int64_t piece_bytes() const { return block_size * head_dim * element_size(dtype); }  // one head of one block
  int64_t cache_bytes() const { return num_blocks() * num_kv_heads * piece_bytes(); }

  CacheView cache(char* data) const {  // [N, Hkv, B, D]
    const int64_t piece = block_size * head_dim;
    if (runs) return {data, dtype, piece, num_blocks() * piece, head_dim};
    return {data, dtype, num_kv_heads * piece, piece, head_dim};
  }
  RowsView rows(char* data, int64_t heads) const { return {data, dtype, heads * head_dim, head_dim}; }

  std::vector<int32_t> table() const {  // [num_seqs, blocks_per_seq]
    std::vector<int32_t> order(num_blocks());
    std::iota(order.begin(), order.end(), 0);
    if (!runs) std::shuffle(order.begin(), order.end(), std::minstd_rand(1));
    return order;
  }
};

float element(const char* data, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return reinterpret_cast<const float*>(data)[index];
  const uint32_t bits = uint32_t{reinterpret_cast<const uint16_t*>(data)[index]} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Numbers in [-2, 2), exact in either dtype.
void fill_randomly(char* data, DType dtype, int64_t count, uint32_t seed) {
  std::minstd_rand engine(seed);
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(engine() % 256) / 64.0f - 2.0f;
    if (dtype == DType::kFloat32) {
      reinterpret_cast<float*>(data)[i] = value;
    } else {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      reinterpret_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
}

struct AttentionCase {
  Shape s;
  Memory query, keys, values, out;
  std::vector<int32_t> table, lens, starts;
  std::vector<float> lse;

  int64_t num_tokens() const { return s.num_seqs * s.query_len; }

  explicit AttentionCase(const Shape& shape)
      : s(shape),
        query(num_tokens() * s.num_q_heads * s.head_dim * element_size(s.dtype)),
        keys(s.cache_bytes()),
        values(s.cache_bytes()),
        out(num_tokens() * s.num_q_heads * s.head_dim * element_size(s.dtype)),
        table(s.table()),
        lens(s.num_seqs, static_cast<int32_t>(s.seq_len)),
        starts(s.num_seqs + 1),
        lse(num_tokens() * s.num_q_heads) {
    for (int64_t i = 0; i <= s.num_seqs; ++i) starts[i] = static_cast<int32_t>(i * s.query_len);
    fill_randomly(query.data(), s.dtype, num_tokens() * s.num_q_heads * s.head_dim, 1);
    fill_randomly(keys.data(), s.dtype, s.cache_bytes() / element_size(s.dtype), 2);
    fill_randomly(values.data(), s.dtype, s.cache_bytes() / element_size(s.dtype), 3);
  }

  AttentionParams params() {
    AttentionParams p{};
    p.num_tokens = num_tokens();
    p.num_seqs = s.num_seqs;
    p.num_q_heads = s.num_q_heads;
    p.num_kv_heads = s.num_kv_heads;
    p.head_dim = s.head_dim;
    p.num_blocks = s.num_blocks();
    p.block_size = s.block_size;
    p.table_width = s.blocks_per_seq();
    p.max_query_len = s.query_len;
    p.max_seq_len = s.seq_len;
    p.window = -1;
    p.scale = scale();
    p.causal = true;
    p.query = s.rows(query.data(), s.num_q_heads);
    p.out = s.rows(out.data(), s.num_q_heads);
    p.lse = lse.data();
    p.lse_stride_token = s.num_q_heads;
    p.lse_stride_head = 1;
    p.key_cache = s.cache(keys.data());
    p.value_cache = s.cache(values.data());
    p.block_tables = table.data();
    p.table_stride_seq = s.blocks_per_seq();
    p.table_stride_block = 1;
    p.seq_lens = lens.data();
    p.query_start_loc = starts.data();
    return p;
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(s.head_dim)); }

  // Whether the last row of the last sequence, last head, is right.
  bool is_right() {
    const AttentionParams p = params();
    const int64_t row = num_tokens() - 1, q_head = s.num_q_heads - 1, kv_head = s.num_kv_heads - 1;
    const int64_t q_offset = row * p.query.stride_token + q_head * p.query.stride_head;
    std::vector<double> scores(s.seq_len), sums(s.head_dim);
    const auto offset = [&](int64_t token) {
      const int64_t block = table[(s.num_seqs - 1) * s.blocks_per_seq() + token / s.block_size];
      return block * p.key_cache.stride_block + kv_head * p.key_cache.stride_head +
             token % s.block_size * p.key_cache.stride_slot;
    };
    for (int64_t token = 0; token < s.seq_len; ++token) {
      for (int64_t d = 0; d < s.head_dim; ++d) {
        scores[token] += static_cast<double>(element(query.data(), s.dtype, q_offset + d)) *
                         element(keys.data(), s.dtype, offset(token) + d) * p.scale;
      }
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    double denominator = 0, error = 0, magnitude = 0;
    for (int64_t token = 0; token < s.seq_len; ++token) {
      const double weight = std::exp(scores[token] - largest);
      denominator += weight;
      for (int64_t d = 0; d < s.head_dim; ++d) {
        sums[d] += weight * element(values.data(), s.dtype, offset(token) + d);
      }
    }
    for (int64_t d = 0; d < s.head_dim; ++d) {
      const double expected = sums[d] / denominator;
      error = std::max(error, std::abs(expected - element(out.data(), s.dtype, q_offset + d)));
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
  Pieces pieces{{}, s.piece_bytes() * s.num_kv_heads / heads};
  for (int64_t head = 0; head < heads; ++head) {
    for (const int64_t block : table) {
      const int64_t offset = (block * view.stride_block + head * view.stride_head) * element_size(s.dtype);
      pieces.starts.insert(pieces.starts.end(), {keys + offset, values + offset});
    }
  }
  return pieces;
}

void attention(benchmark::State& state, const Shape& s) {
  AttentionCase work(s);
  const AttentionParams params = work.params();
  const auto call = [&] { return cpu::backend().paged_attention(params, context()); };
  if (Error error = call()) return state.SkipWithError(error);
  if (!work.is_right()) return state.SkipWithError("the result is wrong");
  if (s.query_len == 1) {
    const Pieces pieces = pieces_of(s, work.table, work.keys.data(), work.values.data());
    run(state, 2.0 * s.cache_bytes(), "GB/s", call, [&] { limits::read(pieces.starts, pieces.bytes); });
  } else {
    const double pairs = s.num_seqs * s.query_len * (s.seq_len - (s.query_len - 1) / 2.0);
    const double flops = 4.0 * pairs * s.num_q_heads * s.head_dim;
    run(state, flops, "GFLOP/s", call, [=] { limits::multiply_add(static_cast<int64_t>(flops / 2)); });
  }
}

// The limit itself, in GB/s of its own.
void page_read(benchmark::State& state, const Shape& s) {
  const Memory keys(s.cache_bytes()), values(s.cache_bytes());
  const Pieces pieces = pieces_of(s, s.table(), keys.data(), values.data());
  const auto read = [&] { limits::read(pieces.starts, pieces.bytes); };
  run(state, 2.0 * s.cache_bytes(), "GB/s", [&]() -> Error { return read(), nullptr; }, read);
}

// Keys and values of one sequence, as packed rows and in the cache; and what a memcpy of so many bytes takes.
struct TokensCase {
  Shape s;
  Memory rows, cache, from, to;
  std::vector<int32_t> table = s.table();
  int64_t bytes = 2 * s.cache_bytes();

  explicit TokensCase(const Shape& shape)
      : s(shape),
        rows(2 * s.cache_bytes()),
        cache(2 * s.cache_bytes()),
        from(2 * s.cache_bytes()),
        to(2 * s.cache_bytes()) {
    fill_randomly(rows.data(), s.dtype, bytes / element_size(s.dtype), 4);
  }
  std::vector<int64_t> slots() const {
    std::vector<int64_t> result(s.seq_len);
    for (int64_t i = 0; i < s.seq_len; ++i) result[i] = table[i / s.block_size] * s.block_size + i % s.block_size;
    return result;
  }
  template <typename Params>
  void fill(Params& p, char* packed) const {
    p.num_tokens = s.seq_len;
    p.num_kv_heads = s.num_kv_heads;
    p.head_dim = s.head_dim;
    p.num_blocks = s.num_blocks();
    p.block_size = s.block_size;
    p.key = s.rows(packed, s.num_kv_heads);
    p.value = s.rows(packed + bytes / 2, s.num_kv_heads);
    p.key_cache = s.cache(cache.data());
    p.value_cache = s.cache(cache.data() + bytes / 2);
  }
  ReshapeAndCacheParams write(const std::vector<int64_t>& slot_mapping) const {
    ReshapeAndCacheParams p{};
    fill(p, rows.data());
    p.slot_mapping = slot_mapping.data();
    return p;
  }
  GatherKvParams gather(char* packed, const int32_t* len) const {
    GatherKvParams p{};
    fill(p, packed);
    p.num_seqs = 1;
    p.table_width = s.blocks_per_seq();
    p.block_tables = table.data();
    p.table_stride_seq = s.blocks_per_seq();
    p.table_stride_block = 1;
    p.seq_lens = len;
    return p;
  }
};

// Writes tokens to their slots and gathers them again: what comes back must be what went in.
void tokens(benchmark::State& state, const Shape& s, bool timed_is_write) {
  const TokensCase work(s);
  const Memory back(work.bytes);
  const std::vector<int64_t> slots = work.slots();
  const int32_t len = static_cast<int32_t>(s.seq_len);
  const ReshapeAndCacheParams write_params = work.write(slots);
  const GatherKvParams gather_params = work.gather(back.data(), &len);
  const auto write = [&] { return cpu::backend().reshape_and_cache(write_params, context()); };
  const auto gather = [&] { return cpu::backend().gather_kv(gather_params, context()); };
  if (Error error = write()) return state.SkipWithError(error);
  if (Error error = gather()) return state.SkipWithError(error);
  if (std::memcmp(work.rows.data(), back.data(), work.bytes) != 0) return state.SkipWithError("the result is wrong");
  const auto limit = [&] { limits::copy(work.to.data(), work.from.data(), work.bytes); };
  if (timed_is_write) {
    run(state, work.bytes, "GB/s", write, limit);
  } else {
    run(state, work.bytes, "GB/s", gather, limit);
  }
}

constexpr int64_t kLayers = 32;

// (source, destination): blocks in random order to others in random order, or runs of neighbours.
std::vector<int64_t> pairs_of(int64_t num_pairs, int64_t first_destination, bool runs) {
  std::vector<int64_t> from(num_pairs), to(num_pairs), mapping;
  std::iota(from.begin(), from.end(), int64_t{0});
  std::iota(to.begin(), to.end(), first_destination);
  if (!runs) {
    std::shuffle(from.begin(), from.end(), std::minstd_rand(1));
    std::shuffle(to.begin(), to.end(), std::minstd_rand(2));
  }
  for (int64_t i = 0; i < num_pairs; ++i) mapping.insert(mapping.end(), {from[i], to[i]});
  return mapping;
}

// Copies num_pairs blocks of block_bytes in keys and values of kLayers layers, within a cache or between two.
void blocks(benchmark::State& state, int64_t num_pairs, int64_t block_bytes, bool runs, bool swap) {
  const int64_t num_tensors = 2 * kLayers, side = num_pairs * block_bytes, bytes = num_tensors * side;
  // Each tensor: the sources and then the destinations; a swap's destinations are a tensor of their own.
  const Memory cache(2 * bytes), from(bytes), to(bytes);
  fill_randomly(cache.data(), DType::kBFloat16, bytes, 5);
  std::vector<BlockedBytes> tensors(num_tensors);
  for (int64_t i = 0; i < num_tensors; ++i) {
    tensors[i].data = cache.data() + i * 2 * side;
    tensors[i].stride_block_bytes = tensors[i].inner_bytes = block_bytes;
  }
  const std::vector<int64_t> mapping = pairs_of(num_pairs, swap ? 0 : num_pairs, runs);
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
  const std::string length = s.query_len == 1 || s.query_len == s.seq_len
                                 ? std::to_string(s.num_seqs) + "x" + std::to_string(s.seq_len)
                                 : std::to_string(s.query_len) + "on" + std::to_string(s.seq_len);
  std::string name = "/" + length + "/heads:" + std::to_string(s.num_q_heads) + ":" + std::to_string(s.num_kv_heads) +
                     "/dim:" + std::to_string(s.head_dim) + "/block:" + std::to_string(s.block_size);
  if (s.dtype == DType::kFloat32) name += "/float32";
  if (s.runs) name += "/runs";
  add(kind + name, [s](benchmark::State& state) { attention(state, s); });
  if (s.query_len == 1) add("page_read" + name, [s](benchmark::State& state) { page_read(state, s); });
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
