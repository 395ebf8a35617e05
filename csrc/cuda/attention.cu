// paged_attention: chooses the kernel by dtypes, head size and alignment, and the grid by capacity alone (num_tokens,
// num_seqs, max_query_len, max_seq_len), so that the host never waits for lengths and a CUDA graph can replay the call.
#include <algorithm>
#include <limits>

#include "attention.cuh"

namespace paged_kv::cuda {
namespace {

// Partial rows for more sequences than fit are worked on in several launches, one after another, with the same result.
constexpr int64_t kMaxWorkspaceBytes = int64_t{256} << 20;

// The most splits that one sequence can have. With a window, a sequence of up to `query_len` query tokens sees
// window + query_len - 1 keys, which touch one split more than they would fill.
// Example: 100000 keys make 196 splits; with a window of 4096 and 1 query token, 4096 keys touch at most 9.
int64_t count_splits(const AttentionParams& p, int64_t query_len) {
  int64_t keys = p.max_seq_len;
  if (p.window > 0) {
    keys = std::min(keys, std::min<int64_t>(p.window, keys) + query_len - 1 + kSplitKeys - 1);
  }
  return std::max<int64_t>(1, ceil_divide<int64_t>(keys, kSplitKeys));
}

}  // namespace

Error paged_attention(const AttentionParams& params, const Context& context) {
  if (params.num_tokens == 0 || params.num_seqs == 0) return nullptr;
  const AttentionKernel* tensor_cores = tensor_core_kernel(params);
  const AttentionKernel& kernel = tensor_cores != nullptr ? *tensor_cores : vector_kernel(params);

  const int64_t group = params.num_q_heads / params.num_kv_heads;
  const int64_t max_query_len = std::min(params.max_query_len, params.num_tokens);
  AttentionLaunch p{};
  static_cast<AttentionParams&>(p) = params;
  p.block_size_divide = FastDivide(static_cast<uint32_t>(params.block_size));
  p.group_divide = FastDivide(static_cast<uint32_t>(group));
  // A window longer than any sequence hides nothing.
  p.window_keys = params.window > 0 && params.window < std::numeric_limits<int32_t>::max()
                      ? static_cast<int32_t>(params.window)
                      : 0;
  p.rows_per_tile = kernel.rows_per_tile;
  p.max_split_rows = static_cast<int32_t>(std::max<int64_t>(kernel.split_rows, group));
  p.split_rows = static_cast<int32_t>(std::min<int64_t>(max_query_len * group, p.max_split_rows));
  p.num_splits = static_cast<int32_t>(count_splits(params, std::max<int64_t>(1, p.split_rows / group)));

  // Tiles of rows: each sequence that is not split has max_split_rows + 1 rows or more, and its last tile may be short.
  int64_t num_tiles = 0;
  if (max_query_len * group > p.max_split_rows) {
    const int64_t rows = params.num_tokens * group;
    num_tiles = rows / kernel.rows_per_tile + std::min(params.num_seqs, rows / (p.max_split_rows + 1));
  }

  const int64_t partial_rows = p.num_splits == 1 ? 0 : params.num_kv_heads * p.split_rows * p.num_splits;  // a sequence
  const int64_t row_bytes = params.head_dim * static_cast<int64_t>(sizeof(float)) + sizeof(SoftmaxState);
  const int64_t seqs_per_launch =
      partial_rows == 0 ? params.num_seqs
                        : std::clamp<int64_t>(kMaxWorkspaceBytes / (partial_rows * row_bytes), 1, params.num_seqs);
  const Workspace workspace(static_cast<size_t>(seqs_per_launch * partial_rows * row_bytes), context);
  if (partial_rows != 0) {
    if (workspace.get() == nullptr) return "out of device memory for the partial results of split sequences";
    p.partial_state = static_cast<SoftmaxState*>(workspace.get());
    p.partial_out = reinterpret_cast<float*>(p.partial_state + seqs_per_launch * partial_rows);
  }

  for (p.first_seq = 0; p.first_seq < params.num_seqs; p.first_seq = p.end_seq) {
    p.end_seq = std::min(p.first_seq + seqs_per_launch, params.num_seqs);
    p.num_split_blocks = (p.end_seq - p.first_seq) * p.num_splits;
    const dim3 grid(static_cast<unsigned>(p.num_split_blocks + num_tiles), static_cast<unsigned>(params.num_kv_heads));
    if (Error error = kernel.launch(p, grid, context)) return error;
    if (partial_rows != 0) {
      if (Error error = merge_splits(p, context)) return error;
    }
    num_tiles = 0;  // the first launch worked on all of them
  }
  return nullptr;
}

}  // namespace paged_kv::cuda
