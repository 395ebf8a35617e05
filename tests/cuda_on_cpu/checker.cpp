// What watches the kernels of the checked build: races, accesses outside of shared memory, and the traffic of memory.
//
// The kernels are compiled with -fsanitize=thread, which makes the compiler call __tsan_read*/__tsan_write* at every
// plain load and store, and linked with the functions below instead of ThreadSanitizer's: it knows OS threads, we know
// CUDA threads, warps, barriers and blocks.
//
// Races. Two accesses to one byte, one of them a write, by threads that no barrier orders (device.h says when two are
// ordered). In shared memory found at the second access, which ends the launch; in global memory at the launch's end.
//
// Traffic. The n-th access at one place of the source by each lane of a warp is one instruction of that warp. Of global
// memory it counts bytes and 32-byte sectors; of shared memory wavefronts, the passes that the 32 banks of 4 bytes
// need, beside those it would need without conflicts.
#include <algorithm>
#include <array>
#include <cstdio>
#include <iomanip>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "runtime.h"

namespace cuda_on_cpu {
namespace {

constexpr int kNobody = -1;
constexpr uintptr_t kSectorBytes = 32;
constexpr int kBanks = 32, kBankBytes = 4;

// Constants of this library, such as source locations for error messages: a GPU's kernel has none of them in its
// memory.
extern "C" const char __ehdr_start __attribute__((visibility("hidden"))), _end __attribute__((visibility("hidden")));
bool is_in_this_library(const void* address) { return address >= &__ehdr_start && address < &_end; }

// When a thread did something, as far as barriers order it.
struct Moment {
  int thread = kNobody;  // rank in the block
  uint32_t block_epoch = 0, warp_epoch = 0;

  bool is_before(const Thread& t) const {
    if (thread == kNobody || thread == t.rank || block_epoch != t.block_epoch) return true;
    return thread / kWarpSize == t.rank / kWarpSize && warp_epoch != t.warp_epoch;
  }
};

Moment now(const Thread& t) { return {t.rank, t.block_epoch, t.warp_epoch}; }

// The last accesses to one byte of shared memory. Two readers are enough: they stand for any that are not ordered.
struct Byte {
  Moment writer;
  std::array<Moment, 2> readers;
};

struct GlobalAccess {
  uintptr_t begin, end;
  uint64_t block;
  Moment moment;
  bool is_atomic;
};

// One instruction of a warp.
struct WarpAccess {
  Space space;
  bool is_write;
  const char* instruction;
  size_t bytes;                                  // of a lane
  std::vector<std::pair<int, uintptr_t>> lanes;  // that take part, in the order in which they came, and their addresses
};

struct Traffic {
  uint64_t instructions = 0, bytes = 0, sectors = 0;
};

struct SharedTraffic {
  uint64_t instructions = 0, wavefronts = 0, ideal_wavefronts = 0;
};

struct Counts {
  uint64_t launches = 0;
  std::map<std::string, uint64_t> warp_operations;
  Traffic read, written, watched;
  std::map<std::string, SharedTraffic> shared;  // by instruction
};

uint64_t count_sectors(const WarpAccess& a) {
  std::set<uintptr_t> sectors;
  for (const auto& [lane, address] : a.lanes) {
    for (uintptr_t s = address / kSectorBytes; s <= (address + a.bytes - 1) / kSectorBytes; ++s) sectors.insert(s);
  }
  return sectors.size();
}

// Lanes go in groups that move 128 bytes at once; a group needs as many passes as its busiest bank has words. Without
// conflicts each group would need one.
struct Wavefronts {
  uint64_t total = 0, ideal = 0;
};

Wavefronts count_wavefronts(const WarpAccess& a) {
  const size_t words = std::max<size_t>(1, a.bytes / kBankBytes), lanes_at_once = kWarpSize / words;
  std::map<size_t, std::array<std::set<uintptr_t>, kBanks>> groups;
  for (const auto& [lane, address] : a.lanes) {
    for (size_t w = 0; w < words; ++w) {
      const uintptr_t word = address / kBankBytes + w;
      groups[static_cast<size_t>(lane) / lanes_at_once][word % kBanks].insert(word);
    }
  }
  Wavefronts count;
  for (const auto& [group, banks] : groups) {
    size_t busiest = 0;
    for (const auto& bank : banks) busiest = std::max(busiest, bank.size());
    count.total += busiest;
    ++count.ideal;
  }
  return count;
}

class Checker : public Observer {
 public:
  void launch_begins(const Launch& launch) override {
    const std::lock_guard lock(mutex_);
    ++counts_[launch.kernel].launches;
    reads_.clear();
    writes_.clear();
  }

  void block_begins(const Block& block) override {
    bytes_.assign(block.shared_bytes, Byte{});
    places_.clear();
    accesses_.clear();
  }

  void access(Thread& t, Access kind, const void* address, size_t size, const char* instruction,
              const Site& site) override {
    const Space space = space_of(t, address);
    if (space == Space::kLocal || is_in_this_library(address)) return;
    const bool is_write = kind != Access::kRead && kind != Access::kAsyncRead;
    if (space == Space::kShared) {
      check_shared(t, is_write, address, size, site);
    } else {
      const auto begin = reinterpret_cast<uintptr_t>(address);
      const GlobalAccess access{begin, begin + size, block_number(*t.block), now(t), kind == Access::kAtomic};
      (is_write ? own_writes_ : own_reads_).push_back(access);
    }
    if (kind != Access::kAsyncArrival) record(t, space, is_write, address, size, instruction, site);
  }

  void warp_operation(Warp&, const char* instruction, const Site&) override { ++own_operations_[instruction]; }

  void block_ends(const Block& block) override {
    const std::lock_guard lock(mutex_);
    Counts& counts = counts_[block.launch->kernel];
    for (const auto& [name, count] : own_operations_) counts.warp_operations[name] += count;
    own_operations_.clear();
    for (const auto& [key, access] : accesses_) add(counts, access);
    accesses_.clear();
    reads_.insert(reads_.end(), own_reads_.begin(), own_reads_.end());
    writes_.insert(writes_.end(), own_writes_.begin(), own_writes_.end());
    own_reads_.clear();
    own_writes_.clear();
  }

  // A race in global memory, or an empty text.
  std::string find_global_race() {
    const auto by_begin = [](const GlobalAccess& a, const GlobalAccess& b) { return a.begin < b.begin; };
    std::sort(writes_.begin(), writes_.end(), by_begin);
    std::sort(reads_.begin(), reads_.end(), by_begin);
    constexpr uintptr_t kLongest = 16;
    for (const GlobalAccess& write : writes_) {
      for (const auto* others : {&writes_, &reads_}) {
        GlobalAccess low = write;
        low.begin -= kLongest - 1;
        for (auto other = std::lower_bound(others->begin(), others->end(), low, by_begin);
             other != others->end() && other->begin < write.end; ++other) {
          if (other->end <= write.begin || (other->is_atomic && write.is_atomic)) continue;
          const bool ordered = other->block == write.block && (other->moment.thread == write.moment.thread ||
                                                               other->moment.block_epoch != write.moment.block_epoch);
          if (ordered) continue;
          char text[256];
          std::snprintf(text, sizeof(text),
                        "race in global memory: thread %d of block %llu writes what thread %d of block %llu %s",
                        write.moment.thread, static_cast<unsigned long long>(write.block), other->moment.thread,
                        static_cast<unsigned long long>(other->block), others == &writes_ ? "writes too" : "reads");
          return text;
        }
      }
    }
    return "";
  }

  void launch_ends(const Launch& launch) override {
    const std::lock_guard lock(mutex_);
    if (std::string race = find_global_race(); !race.empty()) {
      report_failure("kernel " + std::string(launch.kernel) + ": " + race);
    }
  }

  void watch(uintptr_t begin, uintptr_t end) { watched_.emplace_back(begin, end); }
  void reset() {
    counts_.clear();
    watched_.clear();
  }

  // As JSON: {kernel: counts}.
  std::string report() const {
    std::ostringstream text;
    auto number = [&](const char* name, uint64_t value) { text << std::quoted(name) << ": " << value << ", "; };
    auto traffic = [&](const char* name, const Traffic& t) {
      text << std::quoted(name) << ": {\"instructions\": " << t.instructions << ", \"bytes\": " << t.bytes
           << ", \"sectors\": " << t.sectors << "}, ";
    };
    const char* before_kernel = "{";
    for (const auto& [kernel, c] : counts_) {
      text << std::exchange(before_kernel, ", ") << std::quoted(kernel) << ": {";
      number("launches", c.launches);
      traffic("read", c.read);
      traffic("written", c.written);
      traffic("watched", c.watched);
      text << "\"shared\": ";
      const char* before_kind = "{";
      for (const auto& [name, s] : c.shared) {
        text << std::exchange(before_kind, ", ") << std::quoted(name) << ": {";
        number("instructions", s.instructions);
        number("wavefronts", s.wavefronts);
        text << "\"ideal_wavefronts\": " << s.ideal_wavefronts << "}";
      }
      text << (c.shared.empty() ? "{}, " : "}, ") << "\"warp_operations\": ";
      const char* before_operation = "{";
      for (const auto& [name, count] : c.warp_operations) {
        text << std::exchange(before_operation, ", ") << std::quoted(name) << ": " << count;
      }
      text << (c.warp_operations.empty() ? "{}}" : "}}");
    }
    text << (counts_.empty() ? "{}" : "}");
    return text.str();
  }

 private:
  static uint64_t block_number(const Block& b) {
    return (uint64_t{b.index.z} * b.launch->grid.y + b.index.y) * b.launch->grid.x + b.index.x;
  }

  static void check_shared(Thread& t, bool is_write, const void* address, size_t size, const Site& site) {
    const auto offset = static_cast<size_t>(static_cast<const char*>(address) - t.block->shared);
    if (offset + size > t.block->shared_bytes) fail("access beyond the shared memory of the block", site);
    for (size_t i = offset; i < offset + size; ++i) {
      Byte& byte = bytes_[i];
      const Moment* other = byte.writer.is_before(t) ? nullptr : &byte.writer;
      if (is_write) {
        for (const Moment& reader : byte.readers) other = reader.is_before(t) ? other : &reader;
      }
      if (other != nullptr) {
        char text[160];
        std::snprintf(text, sizeof(text), "race in shared memory: this thread %s byte %zu, which thread %d %s",
                      is_write ? "writes" : "reads", i, other->thread,
                      other == &byte.writer ? "has written since the last barrier" : "has read since the last barrier");
        fail(text, site);
      }
      if (is_write) {
        byte = {now(t), {}};
      } else if (byte.readers[0].thread == t.rank || byte.readers[0].is_before(t)) {
        byte.readers[0] = now(t);
      } else {
        byte.readers[1] = now(t);
      }
    }
  }

  struct Place {
    const void* code;
    const char* file;
    uint32_t line;
    const char* instruction;
    int warp;
    bool is_write;
    auto operator<=>(const Place&) const = default;
  };

  static void record(Thread& t, Space space, bool is_write, const void* address, size_t size, const char* instruction,
                     const Site& site) {
    const Place place{site.address, site.file, site.line, instruction, t.rank / kWarpSize, is_write};
    const uint32_t number = places_[{place, t.lane}]++;
    WarpAccess& access = accesses_[{place, number}];
    access.space = space;
    access.is_write = is_write;
    access.instruction = instruction;
    access.bytes = size;
    access.lanes.emplace_back(t.lane, reinterpret_cast<uintptr_t>(address));
  }

  void add(Counts& counts, const WarpAccess& a) {
    if (a.space == Space::kShared) {
      SharedTraffic& shared = counts.shared[std::string(a.instruction) + (a.is_write ? " write" : " read")];
      ++shared.instructions;
      const Wavefronts wavefronts = count_wavefronts(a);
      shared.wavefronts += wavefronts.total;
      shared.ideal_wavefronts += wavefronts.ideal;
      return;
    }
    auto count = [&](Traffic& traffic) {
      ++traffic.instructions;
      traffic.bytes += a.bytes * a.lanes.size();
      traffic.sectors += count_sectors(a);
    };
    count(a.is_write ? counts.written : counts.read);
    for (const auto& [begin, end] : watched_) {
      if (!a.is_write && a.lanes[0].second >= begin && a.lanes[0].second < end) count(counts.watched);
    }
  }

  // Of the block that this OS thread runs
  static inline thread_local std::vector<Byte> bytes_;
  static inline thread_local std::map<std::pair<Place, int>, uint32_t> places_;
  static inline thread_local std::map<std::pair<Place, uint32_t>, WarpAccess> accesses_;
  static inline thread_local std::map<std::string, uint64_t> own_operations_;
  static inline thread_local std::vector<GlobalAccess> own_reads_, own_writes_;

  std::mutex mutex_;
  std::map<std::string, Counts> counts_;
  std::vector<std::pair<uintptr_t, uintptr_t>> watched_;
  std::vector<GlobalAccess> reads_, writes_;
};

Checker checker;
[[maybe_unused]] const bool installed = (observer = &checker, true);

void plain(Access kind, const void* address, size_t bytes, const void* code) {
  if (Thread* t = current_thread()) checker.access(*t, kind, address, bytes, "plain", Site(code));
}

}  // namespace
}  // namespace cuda_on_cpu

using cuda_on_cpu::Access;
using cuda_on_cpu::checker;

#define EXPORT extern "C" __attribute__((visibility("default")))

// For Python.
EXPORT void cuda_on_cpu_reset() { checker.reset(); }
EXPORT void cuda_on_cpu_watch(uintptr_t begin, uintptr_t end) { checker.watch(begin, end); }
EXPORT const char* cuda_on_cpu_report() {
  static std::string text;
  text = checker.report();
  return text.c_str();
}

// What -fsanitize=thread makes the compiler call.
#define PLAIN(name, kind, bytes)                                                   \
  extern "C" void __tsan_##name(void* address) {                                   \
    cuda_on_cpu::plain(Access::kind, address, bytes, __builtin_return_address(0)); \
  }
#define PLAIN_OF_SIZE(bytes)       \
  PLAIN(read##bytes, kRead, bytes) \
  PLAIN(write##bytes, kWrite, bytes)
#define UNALIGNED_OF_SIZE(bytes)             \
  PLAIN(unaligned_read##bytes, kRead, bytes) \
  PLAIN(unaligned_write##bytes, kWrite, bytes)
PLAIN_OF_SIZE(1)
PLAIN_OF_SIZE(2)
PLAIN_OF_SIZE(4)
PLAIN_OF_SIZE(8)
PLAIN_OF_SIZE(16)
UNALIGNED_OF_SIZE(2)
UNALIGNED_OF_SIZE(4)
UNALIGNED_OF_SIZE(8)
UNALIGNED_OF_SIZE(16)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(void* address, size_t bytes) {
  cuda_on_cpu::plain(Access::kRead, address, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  cuda_on_cpu::plain(Access::kWrite, address, bytes, __builtin_return_address(0));
}
}
