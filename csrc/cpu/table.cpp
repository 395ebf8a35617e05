// One backend table per instruction set; compiled once for each.
#include "cpu/kernels.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

const Backend& backend_for_isa() {
  static constexpr Backend table = {
      .name = PAGED_KV_ISA_NAME,
      .paged_attention = paged_attention,
      .reshape_and_cache = reshape_and_cache,
      .copy_blocks = copy_blocks,
      .swap_blocks = swap_blocks,
      .gather_kv = gather_kv,
      .merge_attention_states = merge_attention_states,
  };
  return table;
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
