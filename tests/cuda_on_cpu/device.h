// A CUDA device made of fibers: what the twins of <cuda_runtime.h> and <arch/ptx.cuh> in include/ are built on, and
// what a checker may watch.
//
// How kernels run. g++ compiles csrc/cuda/*.cu unchanged, with include/ first on the path. A launch runs at once,
// inside cudaLaunchKernelEx, and returns when the grid has ended. CUDA blocks are spread over OS threads
// (CUDA_ON_CPU_THREADS, default: all cores); a block lives on one OS thread. Each CUDA thread is a fiber with a stack
// of its own. Fibers run one after another and give way only at a warp operation, a barrier or their end, so lock-step
// luck never hides a missing barrier. Which lane and which warp goes first is drawn from CUDA_ON_CPU_SEED for each
// block; 0, the default, is ascending order.
//
// What is stricter than a GPU, always:
//   - Shared memory is exactly as large as launched with and starts as 0xff bytes, NaN in every float type.
//   - cp.async makes its destination 0xff bytes at once and delivers at the wait_group that covers it, in the thread
//     that waits. A read before the wait, or a buffer overwritten while still in use, gives NaN.
//   - Warp operations need all 32 lanes at the same operation and source line; barriers need every thread of the block.
//     Otherwise the launch fails and says which kernel, block and threads stood where.
//   - A launch with more than 48 KiB of shared memory needs cudaFuncSetAttribute before.
//
// What a checker may add, through `observer`: every access made by a PTX twin or an atomic is reported with thread,
// address and source line, and so are warp operations, barriers, blocks and launches. Plain C++ loads and stores are
// seen by compiling the kernels with -fsanitize=thread against a runtime of one's own, whose __tsan_read*/__tsan_write*
// call observe() with the return address as site. Order within a block: accesses of two threads are ordered if their
// `block_epoch` differs, or if they are in one warp and their `warp_epoch` differs (__syncwarp; shuffles, votes, mma
// and ldmatrix order no memory, as in CUDA). Accesses of different blocks are never ordered.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <source_location>

// Of functions that stand for registers or for the harness itself: the checked build must not see what they read.
// (Not inlined, as GCC would then watch them with their caller.)
#define NOT_A_MEMORY_ACCESS __attribute__((no_sanitize("thread"), noinline))

namespace cuda_on_cpu {

inline constexpr int kWarpSize = 32;

// Where in the kernel's source something happened. A plain access has the code address instead, and line 0.
struct Site {
  const char* file = "";
  uint32_t line = 0;
  const void* address = nullptr;

  Site() = default;
  Site(const std::source_location& at) : file(at.file_name()), line(at.line()) {}
  explicit Site(const void* code) : address(code) {}
};

struct Block;
struct Warp;

struct Thread {
  uint3 index;  // threadIdx
  int rank;     // in the block, x fastest
  int lane;     // in the warp
  Warp* warp;
  Block* block;
  uint32_t block_epoch;  // __syncthreads passed
  uint32_t warp_epoch;   // __syncwarp passed
};

struct Launch {
  const char* kernel;  // demangled
  dim3 grid, block;
  size_t shared_bytes;
  const char* parameters;  // of the kernel
  size_t parameter_bytes;
};

struct Block {
  const Launch* launch;
  uint3 index;  // blockIdx
  char* shared;
  size_t shared_bytes;
  const char *stacks, *stacks_end;  // of all its threads
};

// The CUDA thread that this OS thread is running; null outside of kernels.
extern thread_local constinit Thread* running __attribute__((tls_model("initial-exec")));
NOT_A_MEMORY_ACCESS inline Thread* current_thread() { return running; }
NOT_A_MEMORY_ACCESS inline int current_lane() { return running->lane; }

enum class Space { kGlobal, kShared, kLocal };

// Which memory of this thread an address lies in; kLocal is the stacks and the kernel's parameters.
Space space_of(const Thread& thread, const void* address);

enum class Access {
  kRead,
  kWrite,
  kAtomic,
  kAsyncRead,     // the source of a cp.async, when it is issued
  kAsyncWrite,    // its destination, when it is issued
  kAsyncArrival,  // its destination, when it arrives: a write in the name of the waiting thread
};

// Calls come from several OS threads at once, but for one block always from the same one.
struct Observer {
  virtual ~Observer() = default;
  virtual void launch_begins(const Launch&) {}
  virtual void launch_ends(const Launch&) {}
  virtual void block_begins(const Block&) {}
  virtual void block_ends(const Block&) {}
  // `instruction` is the PTX twin's name, or "plain" or "atomic".
  virtual void access(Thread&, Access, const void* /*address*/, size_t /*bytes*/, const char* /*instruction*/,
                      const Site&) {}
  // Once for a warp, when the last of its lanes arrives: a shuffle, a vote, __syncwarp, mma, ldmatrix ...
  virtual void warp_operation(Warp&, const char* /*instruction*/, const Site&) {}
  // Once for a block, when the last of its threads arrives.
  virtual void block_barrier(Block&, const Site&) {}
};

// The one in use, or null. Set it only while no kernel runs.
extern Observer* observer;

NOT_A_MEMORY_ACCESS inline void observe(Access kind, const void* address, size_t bytes, const char* instruction,
                                        const Site& site) {
  if (observer != nullptr) observer->access(*current_thread(), kind, address, bytes, instruction, site);
}

// Ends the running launch with an error that names kernel, block and thread; cudaGetErrorString returns it.
[[noreturn]] void fail(const char* what, const Site& site);

// ---------------------------------------------------------------------------------------------------------------------
// What the twins use

// Waits until all 32 lanes of the warp are here, lets the last one call operation(arguments by lane), then all go on.
// With orders_memory it counts as __syncwarp.
void warp_operation(const char* instruction, void* argument, void (*operation)(void* const* arguments),
                    const Site& site, bool orders_memory = false);

// Waits until all threads of the block are here; returns how many of them came with a predicate that holds.
int block_barrier(bool predicate, const Site& site);

// The block's dynamic shared memory, checked to be at least `bytes` large.
void* shared_memory(size_t bytes, const Site& site);

// cp.async: `source` may be null, which fills with zeros.
void async_copy(void* shared, const void* source, size_t bytes, const char* instruction, const Site& site);
void async_commit();
void async_wait(int groups_in_flight);

struct Grid {
  dim3 grid, block;
  size_t shared_bytes;
  const void* kernel;
  void (*call)(void* arguments);
  void* arguments;
  size_t argument_bytes;
};
cudaError_t run(const Grid& grid);

}  // namespace cuda_on_cpu
