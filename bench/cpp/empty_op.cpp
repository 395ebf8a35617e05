// torch.ops.paged_kv_bench.empty_op: takes what paged_attention.out takes and does nothing with it, which tells what a
// call through torch.ops takes; bench/attention.py compiles it for itself.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

void empty_op(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
              int64_t, double, bool, int64_t, double, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
              const MaybeTensor&, const Tensor&, const Tensor&) {}

}  // namespace

TORCH_LIBRARY(paged_kv_bench, library) {
  library.def(
      "empty_op(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
      "Tensor query_start_loc, SymInt max_query_len, SymInt max_seq_len, float scale, bool causal=True, int window=-1, "
      "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "
      "*, Tensor(a!) out, Tensor(b!) lse) -> ()");
  library.impl("empty_op", torch::dispatch(c10::DispatchKey::CPU, empty_op));
}
