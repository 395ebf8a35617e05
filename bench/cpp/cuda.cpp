// The CUDA kernels without Python and PyTorch: `bench_cuda`, with Google Benchmark's options, of which
// --benchmark_filter, --benchmark_out=FILE and --benchmark_list_tests (which needs no GPU) are the useful ones.
//
// Times are the device's, between two events around one call, with a cold L2 cache. "of_copy" is the share of what a
// copy within the device reaches, measured at the start, read and written bytes counted. Before attention is timed, its
// result for one sequence is compared with that of the CPU kernels.
#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
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
#include "cuda/kernels.h"

namespace {

using namespace paged_kv;

constexpr int kIterations = 50;  // fixed, so that Google Benchmark makes a benchmark's inputs once
constexpr int64_t kGiB = int64_t{1} << 30;
double copy_rate = 0;  // bytes a second

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "bench_cuda: %s\n", what.c_str());
  std::exit(1);
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(status));
}

void check(Error error, const char* what) {
  if (error != nullptr) fail(std::string(what) + ": " + error);
}

void* allocate(size_t bytes, void*) {
  void* memory = nullptr;
  return cudaMallocAsync(&memory, bytes, nullptr) == cudaSuccess ? memory : nullptr;
}
void release(void* memory, void*) { cudaFreeAsync(memory, nullptr); }
const Context kDevice{nullptr, 1, nullptr, allocate, release};

void serial(int64_t n, int64_t, void (*body)(void*, int64_t, int64_t), void* arg) { body(arg, 0, n); }
const Context kHost{serial, 1, nullptr};

// Memory of the device, with what a host vector holds.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(size_t count) : count_(count) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)), "cudaMalloc");
  }
  explicit OnDevice(const std::vector<T>& host) : OnDevice(host.size()) {
    check(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  T* get() const { return data_; }
  std::vector<T> to_host() const {
    std::vector<T> host(count_);
    check(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }

 private:
  size_t count_;
  T* data_ = nullptr;
};

// Seconds of each call on the device; before it, the L2 cache is overwritten.
class Clock {
 public:
  Clock() {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    bytes_ = 4 * static_cast<size_t>(properties.l2CacheSize);
    check(cudaMalloc(&scratch_, bytes_), "cudaMalloc");
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Clock() {
    cudaFree(scratch_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  template <class Call>
  double time(Call call) {
    check(cudaMemsetAsync(scratch_, 0, bytes_, nullptr), "cudaMemsetAsync");
    check(cudaEventRecord(begin_, nullptr), "cudaEventRecord");
    call();
    check(cudaEventRecord(end_, nullptr), "cudaEventRecord");
    check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return milliseconds / 1e3;
  }

 private:
  size_t bytes_;
  void* scratch_ = nullptr;
  cudaEvent_t begin_, end_;
};

double measure_copy_rate() {
  OnDevice<char> from(kGiB), to(kGiB);
  Clock clock;
  std::vector<double> seconds;
  for (int i = 0; i < 11; ++i) {
    seconds.push_back(clock.time(
        [&] { check(cudaMemcpyAsync(to.get(), from.get(), kGiB, cudaMemcpyDeviceToDevice, nullptr), "copy"); }));
  }
  std::sort(seconds.begin(), seconds.end());
  return 2.0 * kGiB / seconds[seconds.size() / 2];
}

// Times `call` over the state's iterations; `bytes` must be moved by each.
template <class Call>
void run(benchmark::State& state, double bytes, double flops, Call call) {
  Clock clock;
  call();
  for (auto _ : state) state.SetIterationTime(clock.time(call));
  const auto rate = [&](double amount) {
    return benchmark::Counter(amount, benchmark::Counter::kIsIterationInvariantRate);
  };
  if (bytes > 0) {
    state.counters["bytes_per_s"] = rate(bytes);
    state.counters["of_copy"] = rate(bytes / copy_rate);
  }
  if (flops > 0) state.counters["flops"] = rate(flops);
}

// bfloat16 numbers in [-2, 2), as their bits.
std::vector<uint16_t> random_rows(size_t count, uint32_t seed) {
  std::minstd_rand engine(seed);
  std::vector<uint16_t> rows(count);
  for (uint16_t& element : rows) {
    const float value = static_cast<float>(engine() % 4096) / 1024.0f - 2.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    element = static_cast<uint16_t>(bits >> 16);
  }
  return rows;
}

float to_float(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

struct Shape {
  int64_t num_seqs, seq_len, query_len, num_q_heads, num_kv_heads, head_dim, block_size;

  int64_t blocks_per_seq() const { return (seq_len + block_size - 1) / block_size; }
  int64_t num_blocks() const { return num_seqs * blocks_per_seq(); }
  int64_t cache_elements() const { return num_blocks() * block_size * num_kv_heads * head_dim; }
};

std::vector<int32_t> random_order(int64_t count) {
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::minstd_rand(1));
  return order;
}

// [N, Hkv, B, D] bfloat16
CacheView cache_of(const Shape& s, uint16_t* data) {
  const int64_t slot = s.head_dim, head = s.block_size * slot;
  return {data, DType::kBFloat16, s.num_kv_heads * head, head, slot};
}

RowsView rows_of(uint16_t* data, int64_t heads, int64_t head_dim) {
  return {data, DType::kBFloat16, heads * head_dim, head_dim};
}

void attention(benchmark::State& state, Shape s) {
  const int64_t num_tokens = s.num_seqs * s.query_len, row = s.num_q_heads * s.head_dim;
  std::vector<uint16_t> query = random_rows(num_tokens * row, 1), keys = random_rows(s.cache_elements(), 2),
                        values = random_rows(s.cache_elements(), 3), out(s.query_len * row);
  std::vector<int32_t> tables = random_order(s.num_blocks()), lens(s.num_seqs, static_cast<int32_t>(s.seq_len)),
                       starts(s.num_seqs + 1);
  for (int64_t i = 0; i <= s.num_seqs; ++i) starts[i] = static_cast<int32_t>(i * s.query_len);
  std::vector<float> lse(s.query_len * s.num_q_heads);

  auto params = [&](int64_t num_seqs, uint16_t* q, uint16_t* k, uint16_t* v, uint16_t* o, float* l, int32_t* table,
                    int32_t* length, int32_t* start) {
    AttentionParams p{};
    p.num_tokens = num_seqs * s.query_len;
    p.num_seqs = num_seqs;
    p.num_q_heads = s.num_q_heads;
    p.num_kv_heads = s.num_kv_heads;
    p.head_dim = s.head_dim;
    p.num_blocks = s.num_blocks();
    p.block_size = s.block_size;
    p.table_width = s.blocks_per_seq();
    p.max_query_len = s.query_len;
    p.max_seq_len = s.seq_len;
    p.window = -1;
    p.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    p.causal = true;
    p.query = rows_of(q, s.num_q_heads, s.head_dim);
    p.out = rows_of(o, s.num_q_heads, s.head_dim);
    p.lse = l;
    p.lse_stride_token = s.num_q_heads;
    p.lse_stride_head = 1;
    p.key_cache = cache_of(s, k);
    p.value_cache = cache_of(s, v);
    p.block_tables = table;
    p.table_stride_seq = s.blocks_per_seq();
    p.table_stride_block = 1;
    p.seq_lens = length;
    p.query_start_loc = start;
    return p;
  };

  const OnDevice<uint16_t> d_query(query), d_keys(keys), d_values(values), d_out(query.size());
  const OnDevice<float> d_lse(num_tokens * s.num_q_heads);
  const OnDevice<int32_t> d_tables(tables), d_lens(lens), d_starts(starts);
  const AttentionParams on_device = params(s.num_seqs, d_query.get(), d_keys.get(), d_values.get(), d_out.get(),
                                           d_lse.get(), d_tables.get(), d_lens.get(), d_starts.get());
  auto call = [&] { check(cuda::backend().paged_attention(on_device, kDevice), "paged_attention"); };

  call();
  const AttentionParams first = params(1, query.data(), keys.data(), values.data(), out.data(), lse.data(),
                                       tables.data(), lens.data(), starts.data());
  check(cpu::backend().paged_attention(first, kHost), "paged_attention on the CPU");
  const std::vector<uint16_t> result = d_out.to_host();
  float error = 0, largest = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    error = std::max(error, std::abs(to_float(result[i]) - to_float(out[i])));
    largest = std::max(largest, std::abs(to_float(out[i])));
  }
  if (!(error <= 0.02f * largest)) return state.SkipWithError("the result differs from that of the CPU kernels");

  if (s.query_len == 1) {
    run(state, 4.0 * s.num_seqs * s.seq_len * s.num_kv_heads * s.head_dim, 0, call);
  } else {
    const double pairs = s.query_len * (s.seq_len - (s.query_len - 1) / 2.0);
    run(state, 0, 4.0 * s.num_seqs * pairs * s.num_q_heads * s.head_dim, call);
  }
}

// 8192 tokens to random slots, or from the slots of one sequence.
constexpr Shape kTokens{1, 8192, 8192, 8, 8, 128, 16};

void write_tokens(benchmark::State& state) {
  const Shape& s = kTokens;
  std::vector<int64_t> slots(s.seq_len);
  std::iota(slots.begin(), slots.end(), int64_t{0});
  std::shuffle(slots.begin(), slots.end(), std::minstd_rand(1));
  const std::vector<uint16_t> rows = random_rows(s.cache_elements(), 4);
  const OnDevice<uint16_t> key(rows), value(rows), key_cache(rows.size()), value_cache(rows.size());
  const OnDevice<int64_t> d_slots(slots);
  ReshapeAndCacheParams p{};
  p.num_tokens = s.seq_len;
  p.num_kv_heads = s.num_kv_heads;
  p.head_dim = s.head_dim;
  p.num_blocks = s.num_blocks();
  p.block_size = s.block_size;
  p.key = rows_of(key.get(), s.num_kv_heads, s.head_dim);
  p.value = rows_of(value.get(), s.num_kv_heads, s.head_dim);
  p.key_cache = cache_of(s, key_cache.get());
  p.value_cache = cache_of(s, value_cache.get());
  p.slot_mapping = d_slots.get();
  run(state, 8.0 * s.cache_elements(), 0,
      [&] { check(cuda::backend().reshape_and_cache(p, kDevice), "reshape_and_cache"); });
}

void gather_tokens(benchmark::State& state) {
  const Shape& s = kTokens;
  const std::vector<uint16_t> rows = random_rows(s.cache_elements(), 4);
  const OnDevice<uint16_t> key_cache(rows), value_cache(rows), key(rows.size()), value(rows.size());
  const OnDevice<int32_t> tables(random_order(s.num_blocks())), lens(std::vector<int32_t>{8192});
  GatherKvParams p{};
  p.num_seqs = 1;
  p.num_kv_heads = s.num_kv_heads;
  p.head_dim = s.head_dim;
  p.num_blocks = s.num_blocks();
  p.block_size = s.block_size;
  p.table_width = s.blocks_per_seq();
  p.num_tokens = s.seq_len;
  p.key_cache = cache_of(s, key_cache.get());
  p.value_cache = cache_of(s, value_cache.get());
  p.key = rows_of(key.get(), s.num_kv_heads, s.head_dim);
  p.value = rows_of(value.get(), s.num_kv_heads, s.head_dim);
  p.block_tables = tables.get();
  p.table_stride_seq = s.blocks_per_seq();
  p.table_stride_block = 1;
  p.seq_lens = lens.get();
  run(state, 8.0 * s.cache_elements(), 0, [&] { check(cuda::backend().gather_kv(p, kDevice), "gather_kv"); });
}

constexpr int64_t kBlockBytes = 32768, kPairs = 64, kTensors = 64;  // keys and values of 32 layers

BlockedBytes blocks_at(char* data) {
  BlockedBytes b{};
  b.data = data;
  b.stride_block_bytes = b.inner_bytes = kBlockBytes;
  return b;
}

// (source, destination): the first kPairs blocks in random order, to those after them.
std::vector<int64_t> random_pairs(int64_t first_destination) {
  const std::vector<int32_t> order = random_order(kPairs);
  std::vector<int64_t> mapping;
  for (int64_t i = 0; i < kPairs; ++i) mapping.insert(mapping.end(), {order[i], first_destination + i});
  return mapping;
}

void copy_layers(benchmark::State& state) {
  const OnDevice<char> memory(2 * kPairs * kBlockBytes * kTensors);
  std::vector<BlockedBytes> tensors;
  for (int64_t i = 0; i < kTensors; ++i) tensors.push_back(blocks_at(memory.get() + i * 2 * kPairs * kBlockBytes));
  const OnDevice<int64_t> mapping(random_pairs(kPairs));
  const CopyBlocksParams p{kTensors, kPairs, tensors.data(), mapping.get()};
  run(state, 2.0 * kPairs * kBlockBytes * kTensors, 0,
      [&] { check(cuda::backend().copy_blocks(p, kDevice), "copy_blocks"); });
}

void swap_out(benchmark::State& state, bool neighbours) {
  const OnDevice<char> memory(kPairs * kBlockBytes);
  char* host = nullptr;
  check(cudaMallocHost(reinterpret_cast<void**>(&host), kPairs * kBlockBytes), "cudaMallocHost");
  std::vector<int64_t> mapping = random_pairs(0);
  for (int64_t i = 0; neighbours && i < kPairs; ++i) mapping[2 * i] = i;
  const SwapBlocksParams p{kPairs, blocks_at(memory.get()), blocks_at(host), mapping.data()};
  run(state, 1.0 * kPairs * kBlockBytes, 0, [&] { check(cuda::backend().swap_blocks(p, kDevice), "swap_blocks"); });
  cudaFreeHost(host);
}

void add(const std::string& name, void (*body)(benchmark::State&, Shape), Shape shape) {
  benchmark::RegisterBenchmark(name.c_str(), [body, shape](benchmark::State& state) { body(state, shape); })
      ->UseManualTime()
      ->Iterations(kIterations)
      ->Unit(benchmark::kMicrosecond);
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->UseManualTime()
      ->Iterations(kIterations)
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace

int main(int argc, char** argv) {
  bool only_list = false;
  for (int i = 1; i < argc; ++i) only_list = only_list || std::string(argv[i]).find("--benchmark_list_tests") == 0;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;

  add("decode/1x32768/heads:32:8/dim:128/block:16", attention, {1, 32768, 1, 32, 8, 128, 16});
  add("decode/16x2048/heads:32:8/dim:128/block:16", attention, {16, 2048, 1, 32, 8, 128, 16});
  add("decode/16x2048/heads:32:8/dim:128/block:32", attention, {16, 2048, 1, 32, 8, 128, 32});
  add("decode/64x1024/heads:12:12/dim:64/block:16", attention, {64, 1024, 1, 12, 12, 64, 16});
  add("decode/64x4096/heads:32:8/dim:128/block:16", attention, {64, 4096, 1, 32, 8, 128, 16});  // 1 GiB
  add("prefill/1x1024/heads:32:8/dim:128/block:16", attention, {1, 1024, 1024, 32, 8, 128, 16});
  add("chunk/256on4096/heads:32:8/dim:128/block:16", attention, {1, 4352, 256, 32, 8, 128, 16});
  add("write/8192", write_tokens);
  add("gather/8192", gather_tokens);
  add("copy/64_blocks/32_layers", copy_layers);
  add("swap/64_blocks/neighbours", [](benchmark::State& state) { swap_out(state, true); });
  add("swap/64_blocks/scattered", [](benchmark::State& state) { swap_out(state, false); });

  if (!only_list) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) fail("expected a CUDA GPU, found none");
    copy_rate = measure_copy_rate();
    benchmark::AddCustomContext("copy within the device", std::to_string(copy_rate / 1e9) + " GB/s");
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
