"""vLLM's CPU attention as a worker (see peers.py), called as vLLM's own backend calls it.

As in vllm/v1/attention/backends/cpu_attn.py: the same cache layout ([num_blocks, num_kv_heads, 2 * block_size,
head_dim], keys before values), the instruction set that `_get_attn_isa` chooses, metadata from its scheduler made once
a step, and keys written by its own op.
"""

from attention_worker import serve, slots_of  # first: it keeps stdout for the answers

import torch  # isort: skip
import vllm  # isort: skip
from vllm import _custom_ops as ops  # isort: skip
from vllm.platforms import current_platform  # isort: skip
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # isort: skip

current_platform.import_kernels()


class Work:
    def __init__(self, case: dict) -> None:
        self.query = case["query"]
        self.scale, self.tables = case["scale"], case["block_tables"]
        self.seq_lens, self.query_start_loc = case["seq_lens"], case["query_start_loc"]
        self.out = torch.empty_like(self.query)
        num_blocks, num_kv_heads, block_size, head_dim = case["cache_shape"]
        cache = torch.zeros(num_blocks, num_kv_heads, 2 * block_size, head_dim, dtype=self.query.dtype)
        self.key_cache, self.value_cache = cache.chunk(2, dim=2)
        self.chosen = _get_attn_isa(self.query.dtype, block_size, head_dim, "auto")
        for table, key, value in zip(
            self.tables, case["keys"], case["values"], strict=True
        ):  # [seq_len, Hkv, D]
            slots = slots_of(table, len(key), block_size)
            ops.cpu_attn_reshape_and_cache(
                key.contiguous(), value.contiguous(), self.key_cache, self.value_cache, slots, self.chosen
            )
        self.metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self.seq_lens),
            num_heads=self.query.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            seq_lens=self.seq_lens,
            dtype=self.query.dtype,
            query_start_loc=self.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self.chosen,
            enable_kv_split=True,
        )

    def __call__(self) -> None:
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            output=self.out,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.tables,
            softcap=0.0,
            scheduler_metadata=self.metadata,
            s_aux=None,
        )


serve(vllm.__version__, Work)
