// The scheduler: blocks over OS threads, and a block's threads as fibers that switch straight to one another.
#include "device.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fiber.h"
#include "runtime.h"

namespace cuda_on_cpu {

thread_local constinit Thread* running = nullptr;
Observer* observer = nullptr;

namespace {

constexpr size_t kSharedAlignment = 1024;
constexpr size_t kMaxSharedBytes = 227 << 10;  // of a block on sm_90
constexpr int kMaxThreads = 1024;
constexpr int kNoBytes = 0xff;  // the value of bytes that nobody wrote: NaN in every float type

enum class State : uint8_t { kReady, kAtWarp, kAtBlock, kDone };

struct AsyncCopy {
  void* destination;
  unsigned char bytes[16];
  size_t size;
  uint32_t group;
  const char* instruction;
  Site site;
};

struct Fiber : Thread {
  Context context;
  State state;
  const char* instruction;  // waited at
  Site site;                // of it
  std::vector<AsyncCopy> copies;
  uint32_t groups_committed;
};

}  // namespace

struct Warp {
  Fiber* lanes[kWarpSize];
  Fiber* order[kWarpSize];  // in which lanes are tried
  int cursor;               // into `order`: the lane that ran last
  int num_ready;
  int num_arrived;
  const char* instruction;  // of the first lane that arrived, and where
  Site site;
  Fiber* first;
  void* arguments[kWarpSize];
};

namespace {

std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char* text, ...) {
  char buffer[2048];
  va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(buffer, sizeof(buffer), text, arguments);
  va_end(arguments);
  return buffer;
}

std::string describe(const uint3& i) { return format("(%u, %u, %u)", i.x, i.y, i.z); }

std::string describe(const Site& site) {
  if (site.address != nullptr) return describe_code(site.address);
  return format("%s:%u", site.file, site.line);
}

// Nearly always one literal.
bool are_equal(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

int environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

// Runs one block at a time on one OS thread. Kept from launch to launch for the sake of its stacks.
class Executor {
 public:
  Executor() : fibers_(kMaxThreads), warps_(kMaxThreads / kWarpSize) {
    shared_ = static_cast<char*>(std::aligned_alloc(kSharedAlignment, kSharedAlignment + kMaxSharedBytes));
    stacks_ = static_cast<char*>(mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  ~Executor() {
    std::free(shared_);
    munmap(stacks_, kMaxThreads * kStackBytes);
  }
  Executor(const Executor&) = delete;

  // Returns an error, or nothing. A block that failed leaves its fibers where they stand.
  std::string run(const Launch& launch, const uint3& index, const Grid& grid, uint32_t seed) {
    block_ = {&launch, index, shared_, launch.shared_bytes, stacks_, stacks_ + kMaxThreads * kStackBytes};
    grid_ = &grid;
    error_.clear();
    // For AddressSanitizer, shared memory ends where the launch says.
    ASAN_UNPOISON_MEMORY_REGION(shared_, launch.shared_bytes);
    ASAN_POISON_MEMORY_REGION(shared_ + launch.shared_bytes, kMaxSharedBytes - launch.shared_bytes);
    std::memset(shared_, kNoBytes, launch.shared_bytes);
    start_fibers(seed);
    if (observer != nullptr) observer->block_begins(block_);
    current_ = this;
    switch_to(*main_, *warp_order_[0]->order[0]);
    current_ = nullptr;
    running = nullptr;
    if (observer != nullptr) observer->block_ends(block_);
    return error_;
  }

  static Executor& current() { return *current_; }

  void warp_operation(const char* instruction, void* argument, void (*operation)(void* const*), const Site& site,
                      bool orders_memory) {
    Fiber& self = *static_cast<Fiber*>(running);
    Warp& warp = *self.warp;
    if (warp.num_arrived == 0) {
      warp.instruction = instruction;
      warp.site = site;
      warp.first = &self;
    } else if (warp.site.line != site.line || !are_equal(warp.instruction, instruction) ||
               !are_equal(warp.site.file, site.file)) {
      fail(("warp divergence: this thread is at " + std::string(instruction) + ", thread " +
            describe(warp.first->index) + " of its warp at " + warp.instruction + ", " + describe(warp.site))
               .c_str(),
           site);
    }
    warp.arguments[self.lane] = argument;
    if (++warp.num_arrived < kWarpSize) {
      wait(self, State::kAtWarp, instruction, site);
      return;
    }
    operation(warp.arguments);
    if (observer != nullptr) observer->warp_operation(warp, instruction, site);
    warp.num_arrived = 0;
    warp.num_ready = kWarpSize;
    for (Fiber* lane : warp.lanes) {
      lane->state = State::kReady;
      lane->warp_epoch += orders_memory;
    }
  }

  int block_barrier(bool predicate, const Site& site) {
    Fiber& self = *static_cast<Fiber*>(running);
    if (num_arrived_ == 0) {
      barrier_site_ = site;
      num_true_ = 0;
    } else if (barrier_site_.line != site.line || !are_equal(barrier_site_.file, site.file)) {
      fail(("barrier divergence: other threads of the block wait at " + describe(barrier_site_)).c_str(), site);
    }
    num_true_ += predicate;
    if (++num_arrived_ < num_threads_) {
      wait(self, State::kAtBlock, "__syncthreads", site);
      return num_true_result_;
    }
    if (observer != nullptr) observer->block_barrier(block_, site);
    num_arrived_ = 0;
    num_true_result_ = num_true_;
    for (int i = 0; i < num_threads_; ++i) {
      fibers_[i].state = State::kReady;
      ++fibers_[i].block_epoch;
    }
    for (int i = 0; i < num_threads_ / kWarpSize; ++i) warps_[i].num_ready = kWarpSize;
    return num_true_result_;
  }

  [[noreturn]] void fail(const char* what, const Site& site) {
    error_ = "kernel " + std::string(block_.launch->kernel) + ", block " + describe(block_.index) + ", thread " +
             describe(running->index) + ", " + describe(site) + ": " + what;
    leave(*static_cast<Fiber*>(running));
  }

 private:
  void start_fibers(uint32_t seed) {
    const dim3 size = block_.launch->block;
    num_threads_ = static_cast<int>(size.x * size.y * size.z);
    num_done_ = num_arrived_ = 0;
    const int num_warps = num_threads_ / kWarpSize;
    std::minstd_rand random(seed);
    for (int rank = 0; rank < num_threads_; ++rank) {
      Fiber& fiber = fibers_[rank];
      const unsigned r = static_cast<unsigned>(rank);
      fiber.index = {r % size.x, r / size.x % size.y, r / size.x / size.y};
      fiber.rank = rank;
      fiber.lane = rank % kWarpSize;
      fiber.warp = &warps_[rank / kWarpSize];
      fiber.block = &block_;
      fiber.block_epoch = fiber.warp_epoch = fiber.groups_committed = 0;
      fiber.state = State::kReady;
      fiber.copies.clear();
      prepare(fiber.context, stacks_ + rank * kStackBytes, kStackBytes, [] { Executor::current().fiber_main(); });
      fiber.warp->lanes[fiber.lane] = fiber.warp->order[fiber.lane] = &fiber;
    }
    warp_order_.resize(static_cast<size_t>(num_warps));
    for (int i = 0; i < num_warps; ++i) {
      Warp& warp = warps_[i];
      warp.cursor = 0;
      warp.num_ready = kWarpSize;
      warp.num_arrived = 0;
      if (seed != 0) std::shuffle(std::begin(warp.order), std::end(warp.order), random);
      warp_order_[i] = &warp;
    }
    if (seed != 0) std::shuffle(warp_order_.begin(), warp_order_.end(), random);
    warp_cursor_ = 0;
  }

  void fiber_main() {
    entered();
    grid_->call(grid_->arguments);
    Fiber& self = *static_cast<Fiber*>(running);
    if (!self.copies.empty()) fail("the thread returns before its cp.async arrived", self.copies.front().site);
    self.state = State::kDone;
    --self.warp->num_ready;
    if (++num_done_ == num_threads_) leave(self);
    Fiber* other = next();
    if (other == nullptr) fail_deadlock();
    switch_to(self.context, *other, /*ends=*/true);
    __builtin_unreachable();
  }

  void wait(Fiber& self, State state, const char* instruction, const Site& site) {
    self.state = state;
    self.instruction = instruction;
    self.site = site;
    --self.warp->num_ready;
    Fiber* other = next();
    if (other == nullptr) fail_deadlock();
    switch_to(self.context, *other);
  }

  // A fiber that can run, of the warp that ran last where there is one; null if there is none.
  Fiber* next() {
    for (size_t tried = 0; tried < warp_order_.size(); ++tried) {
      Warp& warp = *warp_order_[warp_cursor_];
      if (warp.num_ready > 0) {
        do {
          warp.cursor = (warp.cursor + 1) % kWarpSize;
        } while (warp.order[warp.cursor]->state != State::kReady);
        return warp.order[warp.cursor];
      }
      warp_cursor_ = (warp_cursor_ + 1) % warp_order_.size();
    }
    return nullptr;
  }

  void switch_to(Context& from, Fiber& to, bool ends = false) {
    running = &to;
    switch_context(from, to.context, ends);
  }

  [[noreturn]] void leave(Fiber& self) {
    running = nullptr;
    switch_context(self.context, *main_, /*ends=*/true);
    __builtin_unreachable();
  }

  // No thread can go on: says how many stand where.
  [[noreturn]] void fail_deadlock() {
    std::map<std::string, std::pair<int, const Fiber*>> places;
    for (int i = 0; i < num_threads_; ++i) {
      const Fiber& fiber = fibers_[i];
      const std::string place = fiber.state == State::kDone
                                    ? std::string("have returned")
                                    : "wait at " + std::string(fiber.instruction) + ", " + describe(fiber.site);
      auto& entry = places.try_emplace(place, 0, &fiber).first->second;
      ++entry.first;
    }
    std::string what = "barrier divergence:";
    for (const auto& [place, entry] : places) {
      what +=
          format(" %d threads (the first is %s) ", entry.first, describe(entry.second->index).c_str()) + place + ";";
    }
    what.pop_back();
    fail(what.c_str(), static_cast<Fiber*>(running)->site);
  }

  static inline thread_local Executor* current_ = nullptr;

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<Warp*> warp_order_;
  size_t warp_cursor_ = 0;
  std::unique_ptr<Context> main_ = std::make_unique<Context>();
  char *shared_, *stacks_;
  Block block_{};
  const Grid* grid_ = nullptr;
  std::string error_;
  int num_threads_ = 0, num_done_ = 0;
  int num_arrived_ = 0, num_true_ = 0, num_true_result_ = 0;
  Site barrier_site_;
};

// Executors that no launch is using.
std::mutex idle_mutex;
std::vector<std::unique_ptr<Executor>> idle_executors;

std::unique_ptr<Executor> take_executor() {
  const std::lock_guard lock(idle_mutex);
  if (idle_executors.empty()) return std::make_unique<Executor>();
  auto executor = std::move(idle_executors.back());
  idle_executors.pop_back();
  return executor;
}

void give_back(std::unique_ptr<Executor> executor) {
  const std::lock_guard lock(idle_mutex);
  idle_executors.push_back(std::move(executor));
}

uint32_t block_seed(uint64_t seed, uint64_t launch, uint64_t block) {
  if (seed == 0) return 0;
  std::seed_seq mixed{seed, launch, block};
  uint32_t result[1];
  mixed.generate(result, result + 1);
  return result[0] | 1;
}

}  // namespace

Space space_of(const Thread& thread, const void* address) {
  const char* p = static_cast<const char*>(address);
  const Block& block = *thread.block;
  const auto is_in = [p](const char* begin, const char* end) { return p >= begin && p < end; };
  if (is_in(block.stacks, block.stacks_end)) return Space::kLocal;
  if (is_in(block.launch->parameters, block.launch->parameters + block.launch->parameter_bytes)) return Space::kLocal;
  return is_in(block.shared, block.shared + kMaxSharedBytes) ? Space::kShared : Space::kGlobal;
}

void fail(const char* what, const Site& site) { Executor::current().fail(what, site); }

void warp_operation(const char* instruction, void* argument, void (*operation)(void* const*), const Site& site,
                    bool orders_memory) {
  Executor::current().warp_operation(instruction, argument, operation, site, orders_memory);
}

int block_barrier(bool predicate, const Site& site) { return Executor::current().block_barrier(predicate, site); }

void* shared_memory(size_t bytes, const Site& site) {
  Block& block = *running->block;
  if (bytes > block.shared_bytes) {
    fail(format("the kernel uses %zu bytes of shared memory, the launch gives %zu", bytes, block.shared_bytes).c_str(),
         site);
  }
  return block.shared;
}

void async_copy(void* shared, const void* source, size_t bytes, const char* instruction, const Site& site) {
  Fiber& self = *static_cast<Fiber*>(running);
  const auto misaligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % bytes != 0; };
  if (misaligned(shared) || misaligned(source)) fail("cp.async with an address that is not aligned to its size", site);
  AsyncCopy copy{shared, {}, bytes, self.groups_committed, instruction, site};
  if (source != nullptr) {
    observe(Access::kAsyncRead, source, bytes, instruction, site);
    std::memcpy(copy.bytes, source, bytes);
  }
  observe(Access::kAsyncWrite, shared, bytes, instruction, site);
  std::memset(shared, kNoBytes, bytes);
  self.copies.push_back(copy);
}

void async_commit() { ++static_cast<Fiber*>(running)->groups_committed; }

void async_wait(int groups_in_flight) {
  Fiber& self = *static_cast<Fiber*>(running);
  size_t kept = 0;
  for (AsyncCopy& copy : self.copies) {
    if (copy.group + static_cast<uint32_t>(groups_in_flight) < self.groups_committed) {
      observe(Access::kAsyncArrival, copy.destination, copy.size, copy.instruction, copy.site);
      std::memcpy(copy.destination, copy.bytes, copy.size);
    } else {
      self.copies[kept++] = copy;
    }
  }
  self.copies.resize(kept);
}

cudaError_t run(const Grid& grid) {
  const uint64_t num_blocks = uint64_t{grid.grid.x} * grid.grid.y * grid.grid.z;
  const uint64_t num_threads = uint64_t{grid.block.x} * grid.block.y * grid.block.z;
  if (num_blocks == 0 || grid.grid.y > 65535 || grid.grid.z > 65535 || grid.grid.x > 0x7fffffffu || num_threads == 0 ||
      num_threads > kMaxThreads || grid.block.z > 64 || grid.shared_bytes > max_dynamic_shared_bytes(grid.kernel)) {
    return record_error(cudaErrorInvalidConfiguration);
  }
  if (const cudaError_t wanted = take_wanted_error(); wanted != cudaSuccess) return wanted;
  if (num_threads % kWarpSize != 0) return report_failure("a block's threads are no multiple of 32");
  static std::atomic<uint64_t> num_launches = 0;
  const uint64_t seed = static_cast<uint64_t>(environment("CUDA_ON_CPU_SEED", 0)), number = num_launches++;
  const std::string name = describe_code(grid.kernel);
  const Launch launch{
      name.c_str(),       grid.grid, grid.block, grid.shared_bytes, static_cast<const char*>(grid.arguments),
      grid.argument_bytes};
  if (observer != nullptr) observer->launch_begins(launch);

  std::atomic<uint64_t> next_block = 0;
  std::mutex error_mutex;
  std::string error;
  auto work = [&] {
    std::unique_ptr<Executor> executor = take_executor();
    for (uint64_t i; (i = next_block++) < num_blocks;) {
      const uint64_t block = seed % 2 == 1 ? num_blocks - 1 - i : i;
      const uint3 index{static_cast<unsigned>(block % grid.grid.x),
                        static_cast<unsigned>(block / grid.grid.x % grid.grid.y),
                        static_cast<unsigned>(block / grid.grid.x / grid.grid.y)};
      if (std::string text = executor->run(launch, index, grid, block_seed(seed, number, block)); !text.empty()) {
        const std::lock_guard lock(error_mutex);
        if (error.empty()) error = std::move(text);
        next_block = num_blocks;
      }
    }
    give_back(std::move(executor));
  };
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const uint64_t num_workers = std::min<uint64_t>(num_blocks, std::max(1, environment("CUDA_ON_CPU_THREADS", cores)));
  std::vector<std::thread> workers;
  for (uint64_t i = 1; i < num_workers; ++i) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();

  if (observer != nullptr) observer->launch_ends(launch);
  return error.empty() ? cudaSuccess : report_failure(error);
}

}  // namespace cuda_on_cpu
