// The CUDA kernels' entry points and their table. Each queues its work on context.stream and returns without waiting.
#pragma once

#include "backend.h"

namespace paged_kv::cuda {

Error paged_attention(const AttentionParams&, const Context&);
Error reshape_and_cache(const ReshapeAndCacheParams&, const Context&);
Error copy_blocks(const CopyBlocksParams&, const Context&);  // block_mapping in device memory, `tensors` in host memory
Error swap_blocks(const SwapBlocksParams&, const Context&);  // block_mapping in host memory
Error gather_kv(const GatherKvParams&, const Context&);
Error merge_attention_states(const MergeStatesParams&, const Context&);

const Backend& backend();

}  // namespace paged_kv::cuda
