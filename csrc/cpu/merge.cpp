#include "cpu/kernels.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

Error merge_attention_states(const MergeStatesParams&, const Context&) {
  return "merge_attention_states has no CPU kernel yet";
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
