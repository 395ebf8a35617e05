// Attention over two disjoint key sets combined. A warp combines one head of one token.
#include "dispatch.h"
#include "elements.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "softmax.cuh"
#include "views.cuh"

namespace paged_kv::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

template <class T>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeStatesParams p) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (row >= p.num_tokens * p.num_heads) return;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = row / p.num_heads, head = row - token * p.num_heads;
  const float lse_a = p.lse_a[token * p.lse_a_stride_token + head * p.lse_a_stride_head];
  const float lse_b = p.lse_b[token * p.lse_b_stride_token + head * p.lse_b_stride_head];
  const bool a_is_empty = lse_a == -INFINITY, b_is_empty = lse_b == -INFINITY;
  const float largest = ptx::max_or_nan(lse_a, lse_b);
  float weight_a = above_zero(expf(lse_a - largest), lse_a - largest);
  float weight_b = above_zero(expf(lse_b - largest), lse_b - largest);
  const float sum = weight_a + weight_b;
  weight_a /= sum;
  weight_b /= sum;
  const T* out_a = token_row<const T>(p.out_a, token, head);
  const T* out_b = token_row<const T>(p.out_b, token, head);
  T* out = token_row<T>(p.out, token, head);
  for (int64_t d = lane; d < p.head_dim; d += kWarpSize) {
    // The other state of an empty one is passed on bit for bit, whatever the empty one holds.
    out[d] = a_is_empty   ? out_b[d]
             : b_is_empty ? out_a[d]
                          : from_float<T>(to_float(out_a[d]) * weight_a + to_float(out_b[d]) * weight_b);
  }
  if (lane == 0) {
    // An infinite LSE has weights of NaN, as in the formula, and is itself the right LSE.
    const float merged = largest == INFINITY ? largest : largest + logf(sum);
    p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = a_is_empty ? lse_b : b_is_empty ? lse_a : merged;
  }
}

}  // namespace

Error merge_attention_states(const MergeStatesParams& p, const Context& context) {
  const int64_t rows = p.num_tokens * p.num_heads;
  if (rows == 0) return nullptr;
  return dispatch_float(p.out.dtype, [&](auto type) {
    const unsigned grid = static_cast<unsigned>(ceil_divide<int64_t>(rows, kWarps));
    return launch(merge_kernel<Element<type()>>, grid, kThreads, 0, context, p);
  });
}

}  // namespace paged_kv::cuda
