// What a device offers: one table of kernels over the structs of params.h. The bindings check every argument, fill a
// struct and call through this table, so that a CPU instruction set, a GPU or a test harness is one more table.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace paged_kv {

// Null on success, else a sentence in static storage. Kernels never throw, print or exit.
using Error = const char*;

// What a kernel may ask of its caller, so that it needs no framework: threads, and on a GPU the stream.
struct Context {
  // Calls body(arg, begin, end) over [0, n) in pieces of at least `grain`, on up to num_threads threads; returns when
  // all ran.
  void (*parallel_for)(int64_t n, int64_t grain, void (*body)(void* arg, int64_t begin, int64_t end), void* arg);
  int num_threads;
  void* stream;  // cudaStream_t; null on the CPU
  // Memory of the stream's device, usable by what is queued on the stream until it is released; null where none is
  // left. Not asked for on the CPU.
  void* (*allocate)(size_t bytes, void* stream) = nullptr;
  void (*release)(void* memory, void* stream) = nullptr;
};

struct Backend {
  const char* name;
  Error (*paged_attention)(const AttentionParams&, const Context&);
  Error (*reshape_and_cache)(const ReshapeAndCacheParams&, const Context&);
  Error (*copy_blocks)(const CopyBlocksParams&, const Context&);
  Error (*swap_blocks)(const SwapBlocksParams&, const Context&);
  Error (*gather_kv)(const GatherKvParams&, const Context&);
  Error (*merge_attention_states)(const MergeStatesParams&, const Context&);
};

}  // namespace paged_kv
