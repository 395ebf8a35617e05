// The CUDA backend: one table for every architecture, since the runtime picks the kernel image.
#include "kernels.h"

namespace paged_kv::cuda {

const Backend& backend() {
  static constexpr Backend table = {
      .name = "cuda",
      .paged_attention = paged_attention,
      .reshape_and_cache = reshape_and_cache,
      .copy_blocks = copy_blocks,
      .swap_blocks = swap_blocks,
      .gather_kv = gather_kv,
      .merge_attention_states = merge_attention_states,
  };
  return table;
}

}  // namespace paged_kv::cuda
