// A sequence's block table: from a token's position to its block and slot. The only place that divides by the block
// size.
#pragma once

#include <cstdint>

#include "fast_divide.cuh"

namespace paged_kv::cuda {

struct Page {
  int64_t block;  // id in the cache
  uint32_t slot;  // in the block
};

class PageTable {
 public:
  // blocks: the sequence's row of block_tables; entries are `stride` elements apart.
  __device__ PageTable(const int32_t* blocks, int64_t stride, const FastDivide& block_size)
      : blocks_(blocks), stride_(stride), block_size_(block_size) {}

  __device__ Page locate(uint32_t position) const {
    Page page;
    const uint32_t entry = block_size_.divide(position, page.slot);
    page.block = blocks_[entry * stride_];
    return page;
  }

 private:
  const int32_t* blocks_;
  int64_t stride_;
  const FastDivide& block_size_;
};

}  // namespace paged_kv::cuda
