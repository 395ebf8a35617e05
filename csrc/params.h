// One plain struct per op: the only thing that bindings and kernels share, on every device. No framework type appears
// here or below. Strides count elements, not bytes; every offset is 64-bit. Sizes use the words of CONTRIBUTING.md.
#pragma once

#include <cstdint>

namespace paged_kv {

enum class DType : int8_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kInt8 };

constexpr bool is_quantised(DType t) { return t >= DType::kFloat8E4M3; }

constexpr int64_t element_size(DType t) {
  return t == DType::kFloat32 ? 4 : (t == DType::kFloat16 || t == DType::kBFloat16) ? 2 : 1;
}

// A key or value cache, logically [num_blocks, num_kv_heads, block_size, head_dim]; the last dimension is contiguous.
struct CacheView {
  void* data;
  DType dtype;
  int64_t stride_block, stride_head, stride_slot;
};

// Float32 scale of a quantised cache: per tensor [1] (all strides 0), per head [num_kv_heads] (only stride_head), or
// per token and head [num_blocks, num_kv_heads, block_size]. data == nullptr means a scale of 1 everywhere.
struct ScaleView {
  float* data;
  int64_t stride_block, stride_head, stride_slot;
};

// A strided [num_tokens, num_heads, head_dim] tensor of packed tokens; the last dimension is contiguous.
struct RowsView {
  void* data;
  DType dtype;
  int64_t stride_token, stride_head;
};

struct AttentionParams {
  int64_t num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, table_width;
  int64_t max_query_len, max_seq_len;
  int64_t window;  // keys a causal row sees, its own among them; -1: no window
  float scale;     // multiplies q.k
  float softcap;   // 0: none
  bool causal;
  RowsView query;  // [num_tokens, num_q_heads, head_dim]
  RowsView out;    // same shape and dtype as query
  float* lse;      // [num_tokens, num_q_heads]
  int64_t lse_stride_token, lse_stride_head;
  CacheView key_cache, value_cache;
  ScaleView k_scale, v_scale;
  const int32_t* block_tables;  // [num_seqs, table_width]
  int64_t table_stride_seq, table_stride_block;
  const int32_t* seq_lens;         // [num_seqs], contiguous
  const int32_t* query_start_loc;  // [num_seqs + 1], contiguous
  const float* alibi_slopes;       // [num_q_heads], contiguous, or null
  const float* sinks;              // [num_q_heads], contiguous, or null
};

struct ReshapeAndCacheParams {
  int64_t num_tokens;  // = length of slot_mapping; key rows beyond it are ignored
  int64_t num_kv_heads, head_dim, num_blocks, block_size;
  RowsView key, value;
  CacheView key_cache, value_cache;
  ScaleView k_scale, v_scale;   // read; written where dynamic
  const int64_t* slot_mapping;  // [num_tokens], contiguous; negative: skip
  bool dynamic;                 // compute and store a scale per token and head
};

// One tensor whose first dimension is num_blocks, seen as bytes: each block is `outer` pieces of `inner_bytes`
// contiguous bytes, described by up to four outer dimensions.
struct BlockedBytes {
  static constexpr int kMaxDims = 4;
  char* data;
  int64_t stride_block_bytes;
  int64_t inner_bytes;  // contiguous bytes per piece
  int num_dims;         // outer dimensions in use, 0 where a block is one contiguous piece
  int64_t size[kMaxDims];
  int64_t stride_bytes[kMaxDims];
};

struct CopyBlocksParams {
  int64_t num_tensors, num_pairs;
  const BlockedBytes* tensors;   // [num_tensors], keys, values and scales of all layers alike
  const int64_t* block_mapping;  // [num_pairs, 2] (source, destination), contiguous, host memory on the CPU backend
};

struct SwapBlocksParams {
  int64_t num_pairs;
  BlockedBytes src, dst;         // equal inner_bytes, num_dims and size
  const int64_t* block_mapping;  // [num_pairs, 2], contiguous, host memory
};

struct GatherKvParams {
  int64_t num_seqs, num_kv_heads, head_dim, num_blocks, block_size, table_width;
  int64_t num_tokens;  // sum of seq_lens
  bool dequantise;     // write float32, scales applied; else the cache's own dtype, bit for bit
  CacheView key_cache, value_cache;
  ScaleView k_scale, v_scale;
  RowsView key, value;  // [num_tokens, num_kv_heads, head_dim]
  const int32_t* block_tables;
  int64_t table_stride_seq, table_stride_block;
  const int32_t* seq_lens;  // [num_seqs], contiguous
};

struct MergeStatesParams {
  int64_t num_tokens, num_heads, head_dim;
  RowsView out_a, out_b, out;  // [num_tokens, num_heads, head_dim], one dtype
  const float *lse_a, *lse_b;  // [num_tokens, num_heads]
  float* lse;
  int64_t lse_a_stride_token, lse_a_stride_head, lse_b_stride_token, lse_b_stride_head;
  int64_t lse_stride_token, lse_stride_head;
};

}  // namespace paged_kv
