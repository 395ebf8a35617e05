#include "cpu/kernels.h"

namespace paged_kv::cpu {

Error copy_blocks(const CopyBlocksParams&, const Context&) { return "copy_blocks has no CPU kernel yet"; }
Error swap_blocks(const SwapBlocksParams&, const Context&) { return "swap_blocks has no CPU kernel yet"; }

}  // namespace paged_kv::cpu
