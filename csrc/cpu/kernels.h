// The CPU kernels' entry points, and the choice of the instruction set (ISA) they run with.
#pragma once

#include <cstddef>

#include "backend.h"

namespace paged_kv::cpu {

// Compiled once: these only move bytes, and memcpy picks its own instructions.
Error copy_blocks(const CopyBlocksParams&, const Context&);
Error swap_blocks(const SwapBlocksParams&, const Context&);

#ifdef PAGED_KV_ISA
// Compiled once per ISA by CMakeLists.txt, which sets PAGED_KV_ISA to the namespace (isa_default, avx2, ...) and
// PAGED_KV_ISA_NAME to the name that users see.
namespace PAGED_KV_ISA {
Error paged_attention(const AttentionParams&, const Context&);
Error reshape_and_cache(const ReshapeAndCacheParams&, const Context&);
Error gather_kv(const GatherKvParams&, const Context&);
Error merge_attention_states(const MergeStatesParams&, const Context&);

const Backend& backend_for_isa();  // the table of the functions above
}  // namespace PAGED_KV_ISA
#endif

struct IsaLevel {
  const char* name;
  bool supported;  // this machine can run it
  const Backend& (*backend)();
};

// All levels built, weakest first (emulated ones, in a build for tests, are the weakest); "default" is always
// supported.
const IsaLevel* isa_levels(size_t* count);

// The table in use: the strongest level supported, until set_isa chooses another.
const Backend& backend();

// Chooses the level that later ops use. False, and no change, where no supported level has this name.
bool set_isa(const char* name);

}  // namespace paged_kv::cpu
