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
#include <functional>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/kernels.h"
#include "work.h"

namespace {

using namespace paged_kv;
using work::Shape;

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

std::vector<uint16_t> random_bfloat16(int64_t count, uint32_t seed) {
  std::vector<uint16_t> elements(count);
  work::fill_randomly(elements.data(), DType::kBFloat16, count, seed);
  return elements;
}

void attention(benchmark::State& state, const Shape& s) {
  std::vector<uint16_t> query = random_bfloat16(s.query_elements(), 1), keys = random_bfloat16(s.cache_elements(), 2),
                        values = random_bfloat16(s.cache_elements(), 3), out(query.size());
  const work::Batch batch(s);
  std::vector<float> lse(s.num_tokens() * s.num_q_heads);
  const OnDevice<uint16_t> d_query(query), d_keys(keys), d_values(values), d_out(query.size());
  const OnDevice<float> d_lse(lse.size());
  const OnDevice<int32_t> d_tables(batch.tables), d_lens(batch.lens), d_starts(batch.starts);
  const AttentionParams on_device =
      work::attention_params(s, {d_query.get(), d_keys.get(), d_values.get(), d_out.get(), d_lse.get(), d_tables.get(),
                                 d_lens.get(), d_starts.get()});
  auto call = [&] { check(cuda::backend().paged_attention(on_device, kDevice), "paged_attention"); };

  call();
  AttentionParams first = work::attention_params(s, {query.data(), keys.data(), values.data(), out.data(), lse.data(),
                                                     batch.tables.data(), batch.lens.data(), batch.starts.data()});
  first.num_seqs = 1;
  first.num_tokens = s.query_len;
  check(cpu::backend().paged_attention(first, kHost), "paged_attention on the CPU");
  const std::vector<uint16_t> result = d_out.to_host();
  float error = 0, largest = 0;
  for (int64_t i = 0; i < s.query_len * s.num_q_heads * s.head_dim; ++i) {
    const float expected = work::element(out.data(), s.dtype, i);
    error = std::max(error, std::abs(work::element(result.data(), s.dtype, i) - expected));
    largest = std::max(largest, std::abs(expected));
  }
  if (!(error <= 0.02f * largest)) return state.SkipWithError("the result differs from that of the CPU kernels");

  if (s.query_len == 1) {
    run(state, 2.0 * s.cache_bytes(), 0, call);
  } else {
    run(state, 0, s.flops(), call);
  }
}

// The tokens of one sequence, to its slots or from them.
void tokens(benchmark::State& state, const Shape& s, bool timed_is_write) {
  const std::vector<uint16_t> content = random_bfloat16(s.cache_elements(), 4);
  const OnDevice<uint16_t> key(content), value(content), key_cache(content), value_cache(content);
  const work::Batch batch(s);
  const OnDevice<int64_t> slots(batch.slots(s));
  const OnDevice<int32_t> table(batch.tables), len(batch.lens);
  const work::TokensMemory memory{key.get(), value.get(), key_cache.get(), value_cache.get()};
  const ReshapeAndCacheParams write = work::write_params(s, memory, slots.get());
  const GatherKvParams gather = work::gather_params(s, memory, table.get(), len.get());
  run(state, 4.0 * s.cache_bytes(), 0, [&] {  // keys and values, read and written
    if (timed_is_write) {
      check(cuda::backend().reshape_and_cache(write, kDevice), "reshape_and_cache");
    } else {
      check(cuda::backend().gather_kv(gather, kDevice), "gather_kv");
    }
  });
}

constexpr int64_t kBlockBytes = 32768, kPairs = 64, kTensors = 2 * work::kLayers;

void copy_layers(benchmark::State& state) {
  const OnDevice<char> memory(2 * kPairs * kBlockBytes * kTensors);
  std::vector<BlockedBytes> tensors;
  for (int64_t i = 0; i < kTensors; ++i) {
    tensors.push_back(work::whole_blocks(memory.get() + i * 2 * kPairs * kBlockBytes, kBlockBytes));
  }
  const OnDevice<int64_t> mapping(work::pairs_of(kPairs, kPairs, false));
  const CopyBlocksParams p{kTensors, kPairs, tensors.data(), mapping.get()};
  run(state, 2.0 * kPairs * kBlockBytes * kTensors, 0,
      [&] { check(cuda::backend().copy_blocks(p, kDevice), "copy_blocks"); });
}

void swap_out(benchmark::State& state, bool runs) {
  const OnDevice<char> memory(kPairs * kBlockBytes);
  char* host = nullptr;
  check(cudaMallocHost(reinterpret_cast<void**>(&host), kPairs * kBlockBytes), "cudaMallocHost");
  const std::vector<int64_t> mapping = work::pairs_of(kPairs, 0, runs);
  const SwapBlocksParams p{kPairs, work::whole_blocks(memory.get(), kBlockBytes), work::whole_blocks(host, kBlockBytes),
                           mapping.data()};
  run(state, 1.0 * kPairs * kBlockBytes, 0, [&] { check(cuda::backend().swap_blocks(p, kDevice), "swap_blocks"); });
  cudaFreeHost(host);
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->UseManualTime()
      ->Iterations(kIterations)
      ->Unit(benchmark::kMicrosecond);
}

void add_attention(const std::string& kind, const Shape& s) {
  add(kind + s.name(), [s](benchmark::State& state) { attention(state, s); });
}

}  // namespace

int main(int argc, char** argv) {
  bool only_list = false;
  for (int i = 1; i < argc; ++i) only_list = only_list || std::string(argv[i]).find("--benchmark_list_tests") == 0;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;

  add_attention("decode", {1, 32768, 1, 32, 8, 128, 16});
  add_attention("decode", {16, 2048, 1, 32, 8, 128, 16});
  add_attention("decode", {16, 2048, 1, 32, 8, 128, 32});
  add_attention("decode", {64, 1024, 1, 12, 12, 64, 16});
  add_attention("decode", {64, 4096, 1, 32, 8, 128, 16});  // 1 GiB
  add_attention("prefill", {1, 1024, 1024, 32, 8, 128, 16});
  add_attention("chunk", {1, 4096, 256, 32, 8, 128, 16});
  const Shape one{1, 8192, 8192, 8, 8, 128, 16};
  add("write/8192", [one](benchmark::State& state) { tokens(state, one, true); });
  add("gather/8192", [one](benchmark::State& state) { tokens(state, one, false); });
  add("copy/64_blocks/32_layers", copy_layers);
  add("swap/64_blocks/runs", [](benchmark::State& state) { swap_out(state, true); });
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
