// Where the tokens of a sequence lie: the only code that divides by the block size.
#pragma once

#include <cstdint>

#include "params.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

// Offsets, in elements from head 0, of `count` neighbouring tokens of one sequence, each within the block that holds
// it.
template <int kTokens>
struct TokenOffsets {
  int64_t key[kTokens], value[kTokens];        // into key_cache and value_cache
  int64_t k_scale[kTokens], v_scale[kTokens];  // into the scales, where there are any
};

class PageTable {
 public:
  PageTable(const AttentionParams& params, int64_t seq)
      : params_(params), blocks_(params.block_tables + seq * params.table_stride_seq) {}

  // Fills in tokens first .. first + count - 1, which the sequence holds: no other table entry is read. The last token
  // is repeated up to a multiple of `multiple`, so that loops over whole groups of tokens stay within valid slots.
  template <int kTokens>
  void locate(int64_t first, int count, int multiple, TokenOffsets<kTokens>& offsets) const {
    const bool scaled = params_.k_scale.data != nullptr || params_.v_scale.data != nullptr;
    int64_t index = first / params_.block_size;
    int64_t slot = first % params_.block_size;
    for (int token = 0; token < count; ++index, slot = 0) {
      const int64_t block = blocks_[index * params_.table_stride_block];
      for (; token < count && slot < params_.block_size; ++token, ++slot) {
        offsets.key[token] = offset(params_.key_cache, block, slot);
        offsets.value[token] = offset(params_.value_cache, block, slot);
        if (!scaled) continue;
        offsets.k_scale[token] = offset(params_.k_scale, block, slot);
        offsets.v_scale[token] = offset(params_.v_scale, block, slot);
      }
    }
    for (int token = count; token % multiple != 0; ++token) {
      offsets.key[token] = offsets.key[count - 1];
      offsets.value[token] = offsets.value[count - 1];
    }
  }

 private:
  template <class View>
  static int64_t offset(const View& view, int64_t block, int64_t slot) {
    return block * view.stride_block + slot * view.stride_slot;
  }

  const AttentionParams& params_;
  const int32_t* blocks_;
};

}  // namespace paged_kv::cpu::PAGED_KV_ISA
