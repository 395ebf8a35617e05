// reshape_and_cache and gather_kv: tokens moved between packed rows [num_tokens, num_kv_heads, head_dim] and the cache.
// Both cut their tokens into runs that fill neighbouring slots of one block, because in most layouts such a run is
// contiguous: all of it in an NHD cache, each head's part of it in a head-major one. Keys and values are two sides of
// the same work.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/streaming.h"
#include "dispatch.h"

namespace paged_kv::cpu::PAGED_KV_ISA {
namespace {

// Bytes of keys and values worth waking a thread for: they take about as long to move as the wake-up (10 us).
constexpr int64_t kGrainBytes = 64 << 10;

// `count` tokens from `token` on, which lie in `block` from slot `offset` on.
struct Run {
  int64_t token, block, offset, count;
};

// The rows of a run on one of its ends; strides in bytes.
struct Rows {
  char* data;
  int64_t stride_token, stride_head;
};

Rows rows_of(const RowsView& view, const Run& run) {
  const int64_t size = element_size(view.dtype);
  return {static_cast<char*>(view.data) + run.token * view.stride_token * size, view.stride_token * size,
          view.stride_head * size};
}

Rows rows_of(const CacheView& view, const Run& run) {
  const int64_t size = element_size(view.dtype);
  return {static_cast<char*>(view.data) + (run.block * view.stride_block + run.offset * view.stride_slot) * size,
          view.stride_slot * size, view.stride_head * size};
}

// Which of a run's two loops is the outer one, so that one end is walked as it lies in memory. Where stores go past the
// caches, that is what is read. Else, up to AVX2, the packed rows, which are the long stream that the machine then
// fetches ahead: Zen 4 writes 1,024 tokens to an HND cache at 64 GB/s so, and at 43 with heads outside. With AVX-512
// the cache's end, where it is one block: Zen 5 writes them at 105 GB/s so, and at 61 with tokens outside.
constexpr bool kWalkCache = kWidth == 16;

bool tokens_outside(const Rows& walked) { return walked.stride_head <= walked.stride_token; }

// Calls body(from, to, token in run, head) for each row of a run.
template <typename From, typename To, typename Body>
void for_each_row(const Rows& from, const Rows& to, const Rows& walked, int64_t count, int64_t num_heads,
                  const Body& body) {
  auto row = [&](int64_t i, int64_t head) {
    body(reinterpret_cast<const From*>(from.data + i * from.stride_token + head * from.stride_head),
         reinterpret_cast<To*>(to.data + i * to.stride_token + head * to.stride_head), i, head);
  };
  if (tokens_outside(walked)) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t head = 0; head < num_heads; ++head) row(i, head);
    }
  } else {
    for (int64_t head = 0; head < num_heads; ++head) {
      for (int64_t i = 0; i < count; ++i) row(i, head);
    }
  }
}

template <bool kStream>
void copy_rows(const Rows& from, const Rows& to, const Rows& walked, int64_t count, int64_t num_heads,
               int64_t row_bytes) {
  if (from.stride_head == row_bytes && to.stride_head == row_bytes) {  // a token's heads are one row
    row_bytes *= num_heads;
    num_heads = 1;
  }
  if (from.stride_token == row_bytes && to.stride_token == row_bytes) {  // a head's tokens are one row
    row_bytes *= count;
    count = 1;
  }
  for_each_row<char, char>(from, to, walked, count, num_heads,
                           [&](const char* source, char* destination, int64_t, int64_t) {
                             copy_bytes<kStream>(destination, source, row_bytes);
                           });
}

// The scale of a row of a run; null data means 1.
struct RunScale {
  float* data;
  int64_t stride_token, stride_head;

  RunScale(const ScaleView& view, const Run& run)
      : data(view.data ? view.data + run.block * view.stride_block + run.offset * view.stride_slot : nullptr),
        stride_token(view.stride_slot),
        stride_head(view.stride_head) {}

  float load(int64_t i, int64_t head) const { return data ? data[i * stride_token + head * stride_head] : 1.f; }
  void store(int64_t i, int64_t head, float scale) const { data[i * stride_token + head * stride_head] = scale; }
};

// Calls body(index, count) for the vectors that n elements fill; count is kWidth but for the last.
template <typename Body>
PAGED_KV_INLINE void for_each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(i, kWidth);
  if (i < n) body(i, static_cast<int>(n - i));
}

template <typename T>
constexpr float kLargest = 127.f;  // largest finite value; int8 leaves -128 out, so that its range is symmetric
template <>
constexpr float kLargest<Float8E4M3> = 448.f;
template <>
constexpr float kLargest<Float8E5M2> = 57344.f;

// The scale that lets a row's largest finite magnitude fill To's range; 1 where no finite element but zero stands.
template <typename To, typename From>
float dynamic_scale(const From* row, int64_t head_dim) {
  constexpr float kSmallest = 0x1p-126f;  // smallest normal float: below it a quotient loses precision
  Vec largest{};
  for_each_vector(head_dim, [&](int64_t i, int count) {
    const Vec magnitude = abs(load(row + i, count));
    largest = max(largest, magnitude < kInfinity ? magnitude : Vec{});
  });
  const float magnitude = reduce_max(largest);
  return magnitude == 0 ? 1.f : std::max(magnitude / kLargest<To>, kSmallest);
}

// ---- reshape_and_cache ----------------------------------------------------------------------------------------------

using Store = void (*)(const ReshapeAndCacheParams&, const RowsView&, const CacheView&, const ScaleView&, const Run&);

template <bool kStream>
void store_copy(const ReshapeAndCacheParams& p, const RowsView& rows, const CacheView& cache, const ScaleView&,
                const Run& run) {
  const Rows from = rows_of(rows, run), to = rows_of(cache, run);
  copy_rows<kStream>(from, to, kStream || !kWalkCache ? from : to, run.count, p.num_kv_heads,
                     p.head_dim * element_size(cache.dtype));
}

template <typename From, typename To>
void store_quantised(const ReshapeAndCacheParams& p, const RowsView& rows, const CacheView& cache,
                     const ScaleView& scale_view, const Run& run) {
  const RunScale scales(scale_view, run);
  const Rows from = rows_of(rows, run), to = rows_of(cache, run);
  for_each_row<From, To>(
      from, to, from, run.count, p.num_kv_heads, [&](const From* source, To* destination, int64_t i, int64_t head) {
        if (p.dynamic) scales.store(i, head, dynamic_scale<To>(source, p.head_dim));
        const float scale = scales.load(i, head);
        // A true division: the product with a reciprocal would round differently.
        for_each_vector(p.head_dim,
                        [&](int64_t d, int count) { store(destination + d, load(source + d, count) / scale, count); });
      });
}

Error pick_store(DType rows, DType cache, bool stream, Store* store) {
  if (rows == cache) {
    *store = stream ? store_copy<true> : store_copy<false>;
    return nullptr;
  }
  return dispatch_float(rows, [&](auto from) {
    return dispatch_quantised(cache, [&](auto to) -> Error {
      *store = store_quantised<Element<from()>, Element<to()>>;
      return nullptr;
    });
  });
}

// Calls body(run) for the runs of tokens [begin, end) that go to neighbouring slots of a block.
template <typename Body>
void for_each_slot_run(const ReshapeAndCacheParams& p, int64_t begin, int64_t end, const Body& body) {
  for (int64_t token = begin; token < end;) {
    const int64_t slot = p.slot_mapping[token];
    if (slot < 0) {
      ++token;
      continue;
    }
    Run run = {.token = token, .block = slot / p.block_size, .offset = slot % p.block_size, .count = 1};
    const int64_t limit = std::min(end - token, p.block_size - run.offset);
    while (run.count < limit && p.slot_mapping[token + run.count] == slot + run.count) ++run.count;
    body(run);
    token += run.count;
  }
}

// ---- gather_kv ------------------------------------------------------------------------------------------------------

using Load = void (*)(const GatherKvParams&, const CacheView&, const ScaleView&, const RowsView&, const Run&);

template <bool kStream>
void load_copy(const GatherKvParams& p, const CacheView& cache, const ScaleView&, const RowsView& rows,
               const Run& run) {
  const Rows from = rows_of(cache, run), to = rows_of(rows, run);
  copy_rows<kStream>(from, to, kStream || kWalkCache ? from : to, run.count, p.num_kv_heads,
                     p.head_dim * element_size(cache.dtype));
}

template <typename From>
void load_dequantised(const GatherKvParams& p, const CacheView& cache, const ScaleView& scale_view,
                      const RowsView& rows, const Run& run) {
  const RunScale scales(scale_view, run);
  const Rows from = rows_of(cache, run), to = rows_of(rows, run);
  for_each_row<From, float>(
      from, to, to, run.count, p.num_kv_heads, [&](const From* source, float* destination, int64_t i, int64_t head) {
        const float scale = scales.load(i, head);
        for_each_vector(p.head_dim,
                        [&](int64_t d, int count) { store(destination + d, load(source + d, count) * scale, count); });
      });
}

Error pick_load(DType cache, bool dequantise, bool stream, Load* load) {
  if (!dequantise) {
    *load = stream ? load_copy<true> : load_copy<false>;
    return nullptr;
  }
  return dispatch_quantised(cache, [&](auto from) -> Error {
    *load = load_dequantised<Element<from()>>;
    return nullptr;
  });
}

// Calls body(run) for the runs of tokens [begin, end), numbered over all sequences, that lie in one block.
template <typename Body>
void for_each_table_run(const GatherKvParams& p, int64_t begin, int64_t end, const Body& body) {
  int64_t seq = 0, seq_begin = 0;  // the sequence at hand and its first token's number
  for (int64_t token = begin; token < end;) {
    while (token >= seq_begin + p.seq_lens[seq]) seq_begin += p.seq_lens[seq++];
    const int64_t position = token - seq_begin, offset = position % p.block_size;
    const int64_t block = p.block_tables[seq * p.table_stride_seq + position / p.block_size * p.table_stride_block];
    const int64_t count = std::min({p.block_size - offset, p.seq_lens[seq] - position, end - token});
    body(Run{.token = token, .block = block, .offset = offset, .count = count});
    token += count;
  }
}

// Tokens a thread takes at least.
int64_t grain(int64_t num_kv_heads, int64_t head_dim, DType dtype) {
  return std::max<int64_t>(1, kGrainBytes / (2 * num_kv_heads * head_dim * element_size(dtype)));
}

// Whether a call writes more keys and values than the caches hold.
bool is_large(int64_t num_tokens, int64_t num_kv_heads, int64_t head_dim, DType written) {
  return exceeds_caches(2 * num_tokens * num_kv_heads * head_dim * element_size(written));
}

}  // namespace

Error reshape_and_cache(const ReshapeAndCacheParams& p, const Context& context) {
  const bool stream = is_large(p.num_tokens, p.num_kv_heads, p.head_dim, p.key_cache.dtype);
  Store store_key, store_value;
  if (Error error = pick_store(p.key.dtype, p.key_cache.dtype, stream, &store_key)) return error;
  if (Error error = pick_store(p.value.dtype, p.value_cache.dtype, stream, &store_value)) return error;
  parallel_for(context, p.num_tokens, grain(p.num_kv_heads, p.head_dim, p.key.dtype), [&](int64_t begin, int64_t end) {
    for_each_slot_run(p, begin, end, [&](const Run& run) {
      store_key(p, p.key, p.key_cache, p.k_scale, run);
      store_value(p, p.value, p.value_cache, p.v_scale, run);
    });
    finish_streaming();
  });
  return nullptr;
}

Error gather_kv(const GatherKvParams& p, const Context& context) {
  const bool stream = is_large(p.num_tokens, p.num_kv_heads, p.head_dim, p.key.dtype);
  Load load_key, load_value;
  if (Error error = pick_load(p.key_cache.dtype, p.dequantise, stream, &load_key)) return error;
  if (Error error = pick_load(p.value_cache.dtype, p.dequantise, stream, &load_value)) return error;
  parallel_for(context, p.num_tokens, grain(p.num_kv_heads, p.head_dim, p.key.dtype), [&](int64_t begin, int64_t end) {
    for_each_table_run(p, begin, end, [&](const Run& run) {
      load_key(p, p.key_cache, p.k_scale, p.key, run);
      load_value(p, p.value_cache, p.v_scale, p.value, run);
    });
    finish_streaming();
  });
  return nullptr;
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
