// paged_attention and merge_attention_states: for each op its checks in a fixed order (dtype, device, layout, shape,
// range), then the allocation of what it returns, then a params struct for the kernel.
//
// Sizes in errors: T tokens, S sequences, Hq query heads, Hkv key/value heads, D head size, N blocks, B block size,
// M block table width, K pairs of blocks.
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "bindings/checks.h"
#include "bindings/ops.h"
#include "bindings/views.h"

namespace paged_kv::bindings {
namespace {

using TensorPair = std::tuple<Tensor, Tensor>;

// ---------------------------------------------------------------------------------------------------------------------
// paged_attention

struct AttentionArgs {
  const Tensor &query, &key_cache, &value_cache, &block_tables, &seq_lens, &query_start_loc;
  int64_t max_query_len, max_seq_len;
  double scale;
  bool causal;
  int64_t window;
  double softcap;
  const MaybeTensor &alibi_slopes, &sinks, &k_scale, &v_scale;
};

// Lengths and table entries agree with one another and with the cache.
void check_sequences(const Checks& checks, const AttentionArgs& a) {
  const Tensor host_lens = on_host(a.seq_lens), host_starts = on_host(a.query_start_loc),
               tables = on_host(a.block_tables);
  const int32_t* starts = host_starts.const_data_ptr<int32_t>();  // [S + 1]
  const int32_t* lens = host_lens.const_data_ptr<int32_t>();      // [S]
  const int64_t num_seqs = host_lens.size(0), num_tokens = a.query.size(0);
  const int64_t num_blocks = a.key_cache.size(0), block_size = a.key_cache.size(2);

  if (starts[0] != 0) checks.fail("query_start_loc", "0 first", c10::str(starts[0]));
  int64_t longest_query = 0, longest_seq = 0;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    if (starts[seq + 1] < starts[seq]) {
      checks.fail("query_start_loc", "numbers that never fall", c10::str(starts[seq + 1], " after ", starts[seq]));
    }
    longest_query = std::max<int64_t>(longest_query, starts[seq + 1] - starts[seq]);
  }
  if (starts[num_seqs] != num_tokens) {
    checks.fail("query_start_loc", c10::str("T = ", num_tokens, " last, the number of rows of query"),
                c10::str(starts[num_seqs]));
  }
  // A sequence may have fewer keys than queries, as a part of the keys has whose result will be merged: then the first
  // rows stand before all of them.
  checks.seq_lens_range(host_lens, a.block_tables.size(1), block_size);
  for (int64_t seq = 0; seq < num_seqs; ++seq) longest_seq = std::max<int64_t>(longest_seq, lens[seq]);
  if (a.max_query_len < longest_query) {
    checks.fail("max_query_len", c10::str("at least the longest query, ", longest_query), c10::str(a.max_query_len));
  }
  if (a.max_seq_len < longest_seq) {
    checks.fail("max_seq_len", c10::str("at least the longest sequence, ", longest_seq), c10::str(a.max_seq_len));
  }
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t query_len = starts[seq + 1] - starts[seq];
    if (query_len == 0) continue;  // nothing is read
    // What the first row's window hides, no row sees: those blocks are never read and may be gone.
    const int64_t first_pos = std::max<int64_t>(0, lens[seq] - query_len);
    const int64_t first_key = a.window < 0 ? 0 : std::max<int64_t>(0, first_pos - a.window + 1);
    checks.table_range(tables, seq, first_key / block_size, (lens[seq] + block_size - 1) / block_size, num_blocks);
  }
}

void check_paged_attention(const DeviceInterface& device, const Checks& checks, const AttentionArgs& a,
                           at::ArrayRef<Arg> written) {
  const Arg query{"query", a.query}, key_cache{"key_cache", a.key_cache}, value_cache{"value_cache", a.value_cache};
  const Arg block_tables{"block_tables", a.block_tables}, seq_lens{"seq_lens", a.seq_lens},
      query_start_loc{"query_start_loc", a.query_start_loc};
  const Args per_head = present({{"alibi_slopes", &a.alibi_slopes}, {"sinks", &a.sinks}});
  const Args scales = present({{"k_scale", &a.k_scale}, {"v_scale", &a.v_scale}});
  Args read{query, key_cache, value_cache, block_tables, seq_lens, query_start_loc};
  read.append(per_head.begin(), per_head.end());
  read.append(scales.begin(), scales.end());

  // dtype
  checks.rows_match_cache(query, key_cache);
  checks.same_dtype(value_cache, key_cache);
  for (const Arg& arg : {block_tables, seq_lens, query_start_loc}) checks.dtype(arg, at::kInt);
  for (const Arg& arg : per_head) checks.dtype(arg, at::kFloat);
  for (const Arg& scale : scales) checks.scale_dtype(scale, key_cache);
  if (!written.empty()) {
    checks.same_dtype(written[0], query);
    checks.dtype(written[1], at::kFloat);
  }

  // device
  checks.device(read, query);
  checks.device(written, query);

  // layout
  for (const Arg& arg : {query, key_cache, value_cache}) checks.last_dim_contiguous(arg);
  for (const Arg& arg : {seq_lens, query_start_loc}) checks.contiguous(arg);
  for (const Arg& arg : per_head) checks.contiguous(arg);
  if (!written.empty()) {
    checks.last_dim_contiguous(written[0]);
    checks.written_apart(written, read);
  }

  // shape
  checks.cache_shape(key_cache);
  checks.shape(value_cache, a.key_cache.sizes(), "of key_cache [N, Hkv, B, D]");
  checks.dims(query, 3, "[T, Hq, D]");
  const int64_t num_tokens = a.query.size(0), num_q_heads = a.query.size(1), num_kv_heads = a.key_cache.size(1);
  checks.shape(query, {num_tokens, num_q_heads, a.key_cache.size(3)}, "[T, Hq, D]");
  if (num_q_heads < 1 || num_q_heads % num_kv_heads != 0) {
    checks.fail("query", c10::str("a multiple of Hkv = ", num_kv_heads, " heads in [T, Hq, D]"),
                c10::str(a.query.sizes()));
  }
  checks.dims(seq_lens, 1, "[S]");
  const int64_t num_seqs = a.seq_lens.size(0);
  checks.dims(block_tables, 2, "[S, M]");
  checks.shape(block_tables, {num_seqs, a.block_tables.size(1)}, "[S, M]");
  checks.shape(query_start_loc, {num_seqs + 1}, "[S + 1]");
  for (const Arg& arg : per_head) checks.shape(arg, {num_q_heads}, "[Hq]");
  for (const Arg& scale : scales) checks.scale_shape(scale, key_cache);
  if (!written.empty()) {
    checks.shape(written[0], a.query.sizes(), "of query [T, Hq, D]");
    checks.shape(written[1], {num_tokens, num_q_heads}, "[T, Hq]");
  }

  // range
  checks.finite("scale", a.scale);
  if (a.window != -1 && a.window < 1) checks.fail("window", "-1 (none) or at least 1", c10::str(a.window));
  checks.finite("softcap", a.softcap);
  if (a.softcap != 0 && !(static_cast<float>(a.softcap) > 0)) {
    checks.fail("softcap", "0 (none) or a float32 above", c10::str(a.softcap));
  }
  if (device.checks_values()) {
    check_sequences(checks, a);
    for (const Arg& scale : scales) checks.scale_range({scale.name, on_host(*scale.tensor)});
  }
}

void run_paged_attention(const DeviceInterface& device, const Checks& checks, const AttentionArgs& a,
                         at::ArrayRef<Arg> written) {
  if (a.query.size(0) == 0) return;
  const Tensor &out = *written[0].tensor, &lse = *written[1].tensor;
  const DType dtype = checks.float_dtype({"query", a.query}),
              cache_dtype = checks.cache_dtype({"key_cache", a.key_cache});
  const AttentionParams params{
      .num_tokens = a.query.size(0),
      .num_seqs = a.seq_lens.size(0),
      .num_q_heads = a.query.size(1),
      .num_kv_heads = a.key_cache.size(1),
      .head_dim = a.query.size(2),
      .num_blocks = a.key_cache.size(0),
      .block_size = a.key_cache.size(2),
      .table_width = a.block_tables.size(1),
      .max_query_len = a.max_query_len,
      .max_seq_len = a.max_seq_len,
      .window = std::min<int64_t>(a.window, std::numeric_limits<int32_t>::max()),  // more hides nothing
      .scale = static_cast<float>(a.scale),
      .softcap = static_cast<float>(a.softcap),
      .causal = a.causal,
      .query = rows_view(a.query, dtype),
      .out = rows_view(out, dtype, /*written=*/true),
      .lse = lse.mutable_data_ptr<float>(),
      .lse_stride_token = lse.stride(0),
      .lse_stride_head = lse.stride(1),
      .key_cache = cache_view(a.key_cache, cache_dtype),
      .value_cache = cache_view(a.value_cache, cache_dtype),
      .k_scale = scale_view(a.k_scale),
      .v_scale = scale_view(a.v_scale),
      .block_tables = a.block_tables.const_data_ptr<int32_t>(),
      .table_stride_seq = a.block_tables.stride(0),
      .table_stride_block = a.block_tables.stride(1),
      .seq_lens = a.seq_lens.const_data_ptr<int32_t>(),
      .query_start_loc = a.query_start_loc.const_data_ptr<int32_t>(),
      .alibi_slopes = floats(a.alibi_slopes),
      .sinks = floats(a.sinks),
  };
  call(device, checks, &Backend::paged_attention, params, written, {"query", a.query});
}

TensorPair paged_attention(const DeviceInterface& device, const Tensor& query, const Tensor& key_cache,
                           const Tensor& value_cache, const Tensor& block_tables, const Tensor& seq_lens,
                           const Tensor& query_start_loc, int64_t max_query_len, int64_t max_seq_len, double scale,
                           bool causal, int64_t window, double softcap, const MaybeTensor& alibi_slopes,
                           const MaybeTensor& sinks, const MaybeTensor& k_scale, const MaybeTensor& v_scale) {
  const Checks checks("paged_attention");
  const AttentionArgs args{query,         key_cache,   value_cache, block_tables, seq_lens, query_start_loc,
                           max_query_len, max_seq_len, scale,       causal,       window,   softcap,
                           alibi_slopes,  sinks,       k_scale,     v_scale};
  check_paged_attention(device, checks, args, {});
  Tensor out = device.empty(query.sizes(), query.options());
  Tensor lse = device.empty(query.sizes().slice(0, 2), query.options().dtype(at::kFloat));
  run_paged_attention(device, checks, args, {{"out", out}, {"lse", lse}});
  return {std::move(out), std::move(lse)};
}

void paged_attention_out(const DeviceInterface& device, const Tensor& query, const Tensor& key_cache,
                         const Tensor& value_cache, const Tensor& block_tables, const Tensor& seq_lens,
                         const Tensor& query_start_loc, int64_t max_query_len, int64_t max_seq_len, double scale,
                         bool causal, int64_t window, double softcap, const MaybeTensor& alibi_slopes,
                         const MaybeTensor& sinks, const MaybeTensor& k_scale, const MaybeTensor& v_scale,
                         const Tensor& out, const Tensor& lse) {
  const Checks checks("paged_attention");
  const AttentionArgs args{query,         key_cache,   value_cache, block_tables, seq_lens, query_start_loc,
                           max_query_len, max_seq_len, scale,       causal,       window,   softcap,
                           alibi_slopes,  sinks,       k_scale,     v_scale};
  const Args written{{"out", out}, {"lse", lse}};
  check_paged_attention(device, checks, args, written);
  run_paged_attention(device, checks, args, written);
}

// ---------------------------------------------------------------------------------------------------------------------
// merge_attention_states

void check_merge(const Checks& checks, const Args& read, at::ArrayRef<Arg> written) {
  const Arg &out_a = read[0], &lse_a = read[1], &out_b = read[2], &lse_b = read[3];
  // dtype
  checks.float_dtype(out_a);
  checks.same_dtype(out_b, out_a);
  for (const Arg& lse : {lse_a, lse_b}) checks.dtype(lse, at::kFloat);
  if (!written.empty()) {
    checks.same_dtype(written[0], out_a);
    checks.dtype(written[1], at::kFloat);
  }

  // device
  checks.device(read, out_a);
  checks.device(written, out_a);

  // layout
  for (const Arg& out : {out_a, out_b}) checks.last_dim_contiguous(out);
  if (!written.empty()) {
    checks.last_dim_contiguous(written[0]);
    checks.written_apart(written, read);
  }

  // shape
  checks.dims(out_a, 3, "[T, Hq, D]");
  checks.shape(out_b, out_a->sizes(), "of out_a [T, Hq, D]");
  for (const Arg& lse : {lse_a, lse_b}) checks.shape(lse, out_a->sizes().slice(0, 2), "[T, Hq]");
  if (!written.empty()) {
    checks.shape(written[0], out_a->sizes(), "of out_a [T, Hq, D]");
    checks.shape(written[1], out_a->sizes().slice(0, 2), "[T, Hq]");
  }
}

void run_merge(const DeviceInterface& device, const Checks& checks, const Args& read, at::ArrayRef<Arg> written) {
  const Tensor &out_a = *read[0].tensor, &lse_a = *read[1].tensor, &out_b = *read[2].tensor, &lse_b = *read[3].tensor;
  const Tensor &out = *written[0].tensor, &lse = *written[1].tensor;
  if (lse.numel() == 0) return;
  const DType dtype = checks.float_dtype(read[0]);
  const MergeStatesParams params{
      .num_tokens = out_a.size(0),
      .num_heads = out_a.size(1),
      .head_dim = out_a.size(2),
      .out_a = rows_view(out_a, dtype),
      .out_b = rows_view(out_b, dtype),
      .out = rows_view(out, dtype, /*written=*/true),
      .lse_a = lse_a.const_data_ptr<float>(),
      .lse_b = lse_b.const_data_ptr<float>(),
      .lse = lse.mutable_data_ptr<float>(),
      .lse_a_stride_token = lse_a.stride(0),
      .lse_a_stride_head = lse_a.stride(1),
      .lse_b_stride_token = lse_b.stride(0),
      .lse_b_stride_head = lse_b.stride(1),
      .lse_stride_token = lse.stride(0),
      .lse_stride_head = lse.stride(1),
  };
  call(device, checks, &Backend::merge_attention_states, params, written, read[0]);
}

TensorPair merge_attention_states(const DeviceInterface& device, const Tensor& out_a, const Tensor& lse_a,
                                  const Tensor& out_b, const Tensor& lse_b) {
  const Checks checks("merge_attention_states");
  const Args read{{"out_a", out_a}, {"lse_a", lse_a}, {"out_b", out_b}, {"lse_b", lse_b}};
  check_merge(checks, read, {});
  Tensor out = device.empty(out_a.sizes(), out_a.options()), lse = device.empty(lse_a.sizes(), lse_a.options());
  run_merge(device, checks, read, {{"out", out}, {"lse", lse}});
  return {std::move(out), std::move(lse)};
}

void merge_attention_states_out(const DeviceInterface& device, const Tensor& out_a, const Tensor& lse_a,
                                const Tensor& out_b, const Tensor& lse_b, const Tensor& out, const Tensor& lse) {
  const Checks checks("merge_attention_states");
  const Args read{{"out_a", out_a}, {"lse_a", lse_a}, {"out_b", out_b}, {"lse_b", lse_b}};
  const Args written{{"out", out}, {"lse", lse}};
  check_merge(checks, read, written);
  run_merge(device, checks, read, written);
}

}  // namespace

void register_attention_ops(torch::Library& library, const DeviceInterface& device) {
  library.impl("paged_attention", on_device(device, paged_attention));
  library.impl("paged_attention.out", on_device(device, paged_attention_out));
  library.impl("merge_attention_states", on_device(device, merge_attention_states));
  library.impl("merge_attention_states.out", on_device(device, merge_attention_states_out));
}

}  // namespace paged_kv::bindings
