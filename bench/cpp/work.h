// The work that the CPU and the CUDA program both measure: its sizes and content, and the params struct of each op over
// memory of either device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "params.h"

namespace work {

using namespace paged_kv;

inline const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"};
  return kNames[static_cast<int>(dtype)];
}

struct Shape {
  int64_t num_seqs, seq_len, query_len, num_q_heads, num_kv_heads, head_dim, block_size;
  DType dtype = DType::kBFloat16;  // of the cache; rows beside a quantised one are bfloat16
  bool runs = false;               // neighbouring blocks in the head-major layout, instead of scattered ones
  int64_t distinct_tokens = 0;     // with a slot of their own, if not all: block tables name their blocks over and over

  int64_t num_tokens() const { return num_seqs * query_len; }
  int64_t blocks_per_seq() const { return (seq_len + block_size - 1) / block_size; }
  int64_t num_entries() const { return num_seqs * blocks_per_seq(); }  // of block tables
  int64_t num_blocks() const { return distinct_tokens > 0 ? distinct_tokens / block_size : num_entries(); }
  int64_t cache_elements() const { return num_blocks() * num_kv_heads * block_size * head_dim; }  // of keys, or values
  int64_t cache_bytes() const { return cache_elements() * element_size(dtype); }
  int64_t query_elements() const { return num_tokens() * num_q_heads * head_dim; }
  DType row_dtype() const { return is_quantised(dtype) ? DType::kBFloat16 : dtype; }
  // Of keys and values, that a call has to read.
  double read_bytes() const { return 2.0 * cache_bytes() / num_blocks() * num_entries(); }

  // Of both products, each pair of a row and a key that it sees counted once.
  double flops() const {
    const double pairs = num_tokens() * (seq_len - (query_len - 1) / 2.0);
    return 4.0 * pairs * num_q_heads * head_dim;
  }

  CacheView cache(void* data) const {  // [num_blocks, num_kv_heads, block_size, head_dim]
    const int64_t piece = block_size * head_dim;
    if (runs) return {data, dtype, piece, num_blocks() * piece, head_dim};
    return {data, dtype, num_kv_heads * piece, piece, head_dim};
  }
  RowsView rows(void* data, int64_t heads) const { return {data, row_dtype(), heads * head_dim, head_dim}; }

  std::string name() const {
    const std::string length = query_len == 1 || query_len == seq_len
                                   ? std::to_string(num_seqs) + "x" + std::to_string(seq_len)
                                   : std::to_string(query_len) + "on" + std::to_string(seq_len);
    std::string name = "/" + length + "/heads:" + std::to_string(num_q_heads) + ":" + std::to_string(num_kv_heads) +
                       "/dim:" + std::to_string(head_dim) + "/block:" + std::to_string(block_size);
    if (dtype != DType::kBFloat16) name += std::string("/") + name_of(dtype);
    if (runs) name += "/runs";
    return name;
  }
};

// Block tables, lengths and starts of a batch of equal sequences.
struct Batch {
  std::vector<int32_t> tables, lens, starts;  // [num_seqs, blocks_per_seq], [num_seqs], [num_seqs + 1]

  explicit Batch(const Shape& s)
      : tables(s.num_entries()), lens(s.num_seqs, static_cast<int32_t>(s.seq_len)), starts(s.num_seqs + 1) {
    std::iota(tables.begin(), tables.end(), 0);
    if (!s.runs) std::shuffle(tables.begin(), tables.end(), std::minstd_rand(1));
    for (int32_t& block : tables) block %= static_cast<int32_t>(s.num_blocks());
    for (int64_t i = 0; i <= s.num_seqs; ++i) starts[i] = static_cast<int32_t>(i * s.query_len);
  }

  // The slots of the first sequence's tokens.
  std::vector<int64_t> slots(const Shape& s) const {
    std::vector<int64_t> result(s.seq_len);
    for (int64_t i = 0; i < s.seq_len; ++i) result[i] = tables[i / s.block_size] * s.block_size + i % s.block_size;
    return result;
  }
};

// Where a call of paged_attention finds its tensors, all contiguous, on one device.
struct AttentionMemory {
  void *query, *keys, *values, *out;
  float* lse;
  const int32_t *tables, *lens, *starts;
};

inline AttentionParams attention_params(const Shape& s, const AttentionMemory& memory) {
  AttentionParams p{};
  p.num_tokens = s.num_tokens();
  p.num_seqs = s.num_seqs;
  p.num_q_heads = s.num_q_heads;
  p.num_kv_heads = s.num_kv_heads;
  p.head_dim = s.head_dim;
  p.num_blocks = s.num_blocks();
  p.block_size = s.block_size;
  p.table_width = s.blocks_per_seq();
  p.max_query_len = s.query_len;
  p.max_seq_len = s.seq_len;
  p.window = -1;
  p.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  p.causal = true;
  p.query = s.rows(memory.query, s.num_q_heads);
  p.out = s.rows(memory.out, s.num_q_heads);
  p.lse = memory.lse;
  p.lse_stride_token = s.num_q_heads;
  p.lse_stride_head = 1;
  p.key_cache = s.cache(memory.keys);
  p.value_cache = s.cache(memory.values);
  p.block_tables = memory.tables;
  p.table_stride_seq = s.blocks_per_seq();
  p.table_stride_block = 1;
  p.seq_lens = memory.lens;
  p.query_start_loc = memory.starts;
  return p;
}

// The tokens of one sequence, packed and in the cache, on one device.
struct TokensMemory {
  void *key, *value, *key_cache, *value_cache;
};

template <typename Params>
void describe_tokens(Params& p, const Shape& s, const TokensMemory& memory) {
  p.num_tokens = s.seq_len;
  p.num_kv_heads = s.num_kv_heads;
  p.head_dim = s.head_dim;
  p.num_blocks = s.num_blocks();
  p.block_size = s.block_size;
  p.key = s.rows(memory.key, s.num_kv_heads);
  p.value = s.rows(memory.value, s.num_kv_heads);
  p.key_cache = s.cache(memory.key_cache);
  p.value_cache = s.cache(memory.value_cache);
}

inline ReshapeAndCacheParams write_params(const Shape& s, const TokensMemory& memory, const int64_t* slots) {
  ReshapeAndCacheParams p{};
  describe_tokens(p, s, memory);
  p.slot_mapping = slots;
  return p;
}

inline GatherKvParams gather_params(const Shape& s, const TokensMemory& memory, const int32_t* table,
                                    const int32_t* len) {
  GatherKvParams p{};
  describe_tokens(p, s, memory);
  p.num_seqs = 1;
  p.table_width = s.blocks_per_seq();
  p.block_tables = table;
  p.table_stride_seq = s.blocks_per_seq();
  p.table_stride_block = 1;
  p.seq_lens = len;
  return p;
}

constexpr int64_t kLayers = 32;  // whose blocks are copied together: keys and values of each are a tensor

inline BlockedBytes whole_blocks(char* data, int64_t block_bytes) {
  BlockedBytes b{};
  b.data = data;
  b.stride_block_bytes = b.inner_bytes = block_bytes;
  return b;
}

// (source, destination): blocks in random order to others in random order, or runs of neighbours.
inline std::vector<int64_t> pairs_of(int64_t num_pairs, int64_t first_destination, bool runs) {
  std::vector<int64_t> from(num_pairs), to(num_pairs), mapping;
  std::iota(from.begin(), from.end(), int64_t{0});
  std::iota(to.begin(), to.end(), first_destination);
  if (!runs) {
    std::shuffle(from.begin(), from.end(), std::minstd_rand(1));
    std::shuffle(to.begin(), to.end(), std::minstd_rand(2));
  }
  for (int64_t i = 0; i < num_pairs; ++i) mapping.insert(mapping.end(), {from[i], to[i]});
  return mapping;
}

inline float element(const void* data, DType dtype, int64_t index) {
  const auto byte = [&] { return static_cast<const uint8_t*>(data)[index]; };
  // The value of a normal number with so many bits of mantissa.
  const auto small_float = [](int byte, int mantissa_bits, int bias) {
    const int exponent = (byte & 0x7f) >> mantissa_bits, mantissa = byte & ((1 << mantissa_bits) - 1);
    const float value = std::ldexp(1.0f + std::ldexp(static_cast<float>(mantissa), -mantissa_bits), exponent - bias);
    return byte & 0x80 ? -value : value;
  };
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  if (dtype == DType::kInt8) return static_cast<const int8_t*>(data)[index];
  if (dtype == DType::kFloat8E4M3) return small_float(byte(), 3, 7);
  if (dtype == DType::kFloat8E5M2) return small_float(byte(), 2, 15);
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(data)[index]} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Numbers in [-2, 2), exact in float32 and bfloat16; in fp8 those of magnitude 0.5 to 2, in int8 whole ones.
inline void fill_randomly(void* data, DType dtype, int64_t count, uint32_t seed) {
  std::minstd_rand engine(seed);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t random = engine();
    const float value = static_cast<float>(random % 256) / 64.0f - 2.0f;
    if (dtype == DType::kFloat32) {
      static_cast<float*>(data)[i] = value;
    } else if (dtype == DType::kInt8) {
      static_cast<int8_t*>(data)[i] = static_cast<int8_t>(value);
    } else if (is_quantised(dtype)) {
      const uint32_t lowest = dtype == DType::kFloat8E4M3 ? 6 << 3 : 14 << 2, codes = lowest == 48 ? 16 : 8;
      static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>((random & 0x80) | (lowest + random % codes));
    } else {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
}

}  // namespace work
