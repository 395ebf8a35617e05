// The schemas of torch.ops.paged_kv, and that no op has a backward.
#include "bindings/ops.h"

#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/autograd.h"

namespace paged_kv::bindings {

void define_ops(torch::Library& library) {
  const char* const schemas[] = {
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
      "Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
      "reshape_and_cache_dynamic(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor(c!) k_scale, Tensor(d!) v_scale) -> ()",
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
      "Tensor query_start_loc, SymInt max_query_len, SymInt max_seq_len, float scale, bool causal=True, int window=-1, "
      "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None) "
      "-> (Tensor out, Tensor lse)",
      "paged_attention.out(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
      "Tensor query_start_loc, SymInt max_query_len, SymInt max_seq_len, float scale, bool causal=True, int window=-1, "
      "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "
      "*, "
      "Tensor(a!) out, Tensor(b!) lse) -> ()",
      "copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()",
      "swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()",
      "gather_kv(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, Tensor? k_scale=None, "
      "Tensor? v_scale=None) -> (Tensor key, Tensor value)",
      "gather_kv.out(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, Tensor? k_scale=None, "
      "Tensor? v_scale=None, *, Tensor(a!) key, Tensor(b!) value) -> ()",
      "merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
      "merge_attention_states.out(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, *, Tensor(a!) out, "
      "Tensor(b!) lse) -> ()",
  };
  for (const char* text : schemas) {
    c10::FunctionSchema schema = torch::schema(text);
    const std::string name = c10::toString(schema.operator_name());
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, no_backward()));
    library.def(std::move(schema));
  }
}

bool checks_values_on_cuda() {
  static const bool wanted = [] {
    const char* text = std::getenv("PAGED_KV_CUDA_CHECKS");
    return text != nullptr && std::string_view(text) == "1";
  }();
  return wanted;
}

void register_backend(torch::Library& library, const DeviceInterface& device) {
  register_attention_ops(library, device);
  register_cache_ops(library, device);
}

}  // namespace paged_kv::bindings
