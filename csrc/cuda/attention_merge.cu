// The partial rows of split sequences merged, in ascending order of the splits. A warp merges a row.
#include "attention.cuh"

namespace paged_kv::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

// Grid: (sequence and row, kv head)
__global__ void __launch_bounds__(kThreads) merge_splits_kernel(const __grid_constant__ AttentionLaunch p) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  const int64_t kv_head = blockIdx.y;
  const int lane = threadIdx.x % kWarpSize;
  if (index >= (p.end_seq - p.first_seq) * p.split_rows) return;
  const int64_t seq_in_launch = index / p.split_rows;
  const int row = static_cast<int>(index - seq_in_launch * p.split_rows);
  const Sequence seq(p, p.first_seq + seq_in_launch);
  if (row >= seq.num_rows(p) || !seq.is_split(p)) return;
  const int num_splits = seq.end_split(p) - seq.first_split(p);
  if (num_splits <= 1) return;  // its only block wrote the finished rows

  const int64_t first = partial_index(p, seq.index, kv_head, row, 0);
  SoftmaxState merged;
  for (int i = 0; i < num_splits; ++i) merged.m = ptx::max_or_nan(merged.m, p.partial_state[first + i].m);
  for (int i = 0; i < num_splits; ++i) {
    const SoftmaxState state = p.partial_state[first + i];
    merged.d += state.d * merged.weight_of(state);
  }
  uint32_t head_in_group;
  const int token = static_cast<int>(p.group_divide.divide(static_cast<uint32_t>(row), head_in_group));
  store_finished_row(p, seq, token, kv_head * p.group() + head_in_group, merged, lane, [&](int d) {
    float sum = 0.0f;
    for (int i = 0; i < num_splits; ++i) {
      sum += p.partial_out[(first + i) * p.head_dim + d] * merged.weight_of(p.partial_state[first + i]);
    }
    return sum;
  });
}

}  // namespace

Error merge_splits(const AttentionLaunch& p, const Context& context) {
  const int64_t rows = (p.end_seq - p.first_seq) * p.split_rows;
  const dim3 grid(static_cast<unsigned>(ceil_divide<int64_t>(rows, kWarps)), static_cast<unsigned>(p.num_kv_heads));
  return launch(merge_splits_kernel, grid, kThreads, 0, context, p);
}

}  // namespace paged_kv::cuda
