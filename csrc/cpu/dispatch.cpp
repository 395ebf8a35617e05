// Which instruction set the CPU kernels run with. A new one is a line in CMakeLists.txt, a declaration and a row here.
#include <atomic>
#include <cstring>
#include <iterator>

#include "cpu/kernels.h"

namespace paged_kv::cpu {

namespace isa_default {
const Backend& backend_for_isa();
}
#ifdef __x86_64__
namespace avx2 {
const Backend& backend_for_isa();
}
namespace avx512 {
const Backend& backend_for_isa();
}
namespace avx512_bf16 {
const Backend& backend_for_isa();
}
#endif
#ifdef PAGED_KV_EMULATION  // a build for tests: AVX-512 on machines without
namespace avx512_emulated {
const Backend& backend_for_isa();
}
namespace avx512_bf16_emulated {
const Backend& backend_for_isa();
}
#endif

namespace {

#ifdef __x86_64__
// Each asks for exactly what CMakeLists.txt lets the compiler use at that level.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

const IsaLevel kLevels[] = {
#ifdef PAGED_KV_EMULATION  // before "default", so that it has to be asked for
    {"avx512_emulated", has_avx2(), avx512_emulated::backend_for_isa},
    {"avx512_bf16_emulated", has_avx2(), avx512_bf16_emulated::backend_for_isa},
#endif
    {"default", true, isa_default::backend_for_isa},
#ifdef __x86_64__
    {"avx2", has_avx2(), avx2::backend_for_isa},
    {"avx512", has_avx512(), avx512::backend_for_isa},
    {"avx512_bf16", has_avx512_bf16(), avx512_bf16::backend_for_isa},
#endif
};

const Backend* strongest() {
  const Backend* best = nullptr;
  for (const IsaLevel& level : kLevels) {
    if (level.supported) best = &level.backend();
  }
  return best;
}

std::atomic<const Backend*> in_use{strongest()};

}  // namespace

const IsaLevel* isa_levels(size_t* count) {
  *count = std::size(kLevels);
  return kLevels;
}

const Backend& backend() { return *in_use.load(std::memory_order_acquire); }

bool set_isa(const char* name) {
  for (const IsaLevel& level : kLevels) {
    if (level.supported && std::strcmp(level.name, name) == 0) {
      in_use.store(&level.backend(), std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace paged_kv::cpu
