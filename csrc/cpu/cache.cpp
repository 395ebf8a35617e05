#include "cpu/kernels.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

Error reshape_and_cache(const ReshapeAndCacheParams&, const Context&) {
  return "reshape_and_cache has no CPU kernel yet";
}
Error gather_kv(const GatherKvParams&, const Context&) { return "gather_kv has no CPU kernel yet"; }

}  // namespace paged_kv::cpu::PAGED_KV_ISA
