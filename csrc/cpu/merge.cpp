// merge_attention_states on the CPU: attention over two disjoint key sets from that over each.
//   lse = log(e^lse_a + e^lse_b),  out = out_a * e^(lse_a - lse) + out_b * e^(lse_b - lse)
// An LSE of -inf is the empty state, and the other state is then copied bit for bit.
#include <algorithm>
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/softmax_state.h"
#include "dispatch.h"

namespace paged_kv::cpu::PAGED_KV_ISA {
namespace {

template <class T>
T* row_of(const RowsView& rows, int64_t token, int64_t head) {
  return static_cast<T*>(rows.data) + token * rows.stride_token + head * rows.stride_head;
}

template <class T>
void merge_row(const MergeStatesParams& p, int64_t token, int64_t head) {
  const T* a = row_of<const T>(p.out_a, token, head);
  const T* b = row_of<const T>(p.out_b, token, head);
  T* out = row_of<T>(p.out, token, head);
  const float lse_a = p.lse_a[token * p.lse_a_stride_token + head * p.lse_a_stride_head];
  const float lse_b = p.lse_b[token * p.lse_b_stride_token + head * p.lse_b_stride_head];
  float& lse = p.lse[token * p.lse_stride_token + head * p.lse_stride_head];
  if (lse_a == -kInfinity || lse_b == -kInfinity) {
    lse = lse_a == -kInfinity ? lse_b : lse_a;
    std::copy_n(lse_a == -kInfinity ? b : a, p.head_dim, out);
    return;
  }
  // An infinite LSE gives e^(inf - inf), so NaN, as in the formula; the infinity itself is the right LSE.
  const float larger = max_or_nan(lse_a, lse_b);
  const float weight_a = exp(lse_a - larger), weight_b = exp(lse_b - larger);
  lse = larger == kInfinity ? larger : larger + __builtin_logf(weight_a + weight_b);
  const Vec share_a = splat(weight_a / (weight_a + weight_b)), share_b = splat(weight_b / (weight_a + weight_b));
  for (int64_t d = 0; d < p.head_dim; d += kWidth) {
    const int count = static_cast<int>(std::min<int64_t>(kWidth, p.head_dim - d));
    store(out + d, fma(load(a + d, count), share_a, load(b + d, count) * share_b), count);
  }
}

}  // namespace

Error merge_attention_states(const MergeStatesParams& p, const Context& context) {
  return dispatch_float(p.out.dtype, [&](auto dtype) -> Error {
    using T = Element<dtype()>;
    constexpr int64_t kGrain = 1 << 14;  // elements: a few microseconds
    const int64_t rows = p.num_tokens * p.num_heads;
    context.parallel_for(
        rows, std::max<int64_t>(1, kGrain / p.head_dim),
        [](void* arg, int64_t begin, int64_t end) {
          const auto& params = *static_cast<const MergeStatesParams*>(arg);
          for (int64_t row = begin; row < end; ++row) {
            merge_row<T>(params, row / params.num_heads, row % params.num_heads);
          }
        },
        const_cast<MergeStatesParams*>(&p));
    return nullptr;
  });
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
