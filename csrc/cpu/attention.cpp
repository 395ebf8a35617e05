#include "cpu/kernels.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

Error paged_attention(const AttentionParams&, const Context&) { return "paged_attention has no CPU kernel yet"; }

}  // namespace paged_kv::cpu::PAGED_KV_ISA
