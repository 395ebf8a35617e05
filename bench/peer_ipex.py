"""Intel's extension for PyTorch as a worker (see peers.py): its PagedAttention module, as its documentation calls it.

It runs where there is no AVX-512 too: its version is followed by the instruction set that it chose.

Decode has an op of its own, one row a sequence; prefill and chunks go through the other, over the same cache
[num_blocks, num_kv_heads, block_size, head_dim].
"""

from attention_worker import serve, slots_of  # first: it keeps stdout for the answers

import intel_extension_for_pytorch as ipex  # isort: skip
import intel_extension_for_pytorch._C as core  # isort: skip  # where its documentation has the instruction set from
import torch  # isort: skip

attention = ipex.llm.modules.PagedAttention


class Work:
    def __init__(self, case: dict) -> None:
        self.query, self.scale, self.tables = case["query"], case["scale"], case["block_tables"]
        self.seq_lens, self.starts = case["seq_lens"], case["query_start_loc"]
        self.out = torch.empty_like(self.query)
        num_blocks, num_kv_heads, self.block_size, head_dim = case["cache_shape"]
        shape = (num_blocks, num_kv_heads, self.block_size, head_dim)
        self.key_cache = torch.zeros(shape, dtype=self.query.dtype)
        self.value_cache = torch.zeros_like(self.key_cache)
        used = []
        for table, key, value in zip(
            self.tables, case["keys"], case["values"], strict=True
        ):  # [seq_len, Hkv, D]
            used.append(table[: -(-len(key) // self.block_size)])
            slots = slots_of(table, len(key), self.block_size).int()
            attention.reshape_and_cache(
                key.contiguous(), value.contiguous(), self.key_cache, self.value_cache, slots
            )
        num_q_heads = self.query.shape[1]
        self.head_mapping = torch.arange(num_kv_heads, dtype=torch.int32).repeat_interleave(
            num_q_heads // num_kv_heads
        )
        self.key_starts = torch.cat([torch.zeros(1), self.seq_lens]).cumsum(0).int()
        self.max_query_len, self.max_seq_len = int(self.starts.diff().max()), int(self.seq_lens.max())
        # Where sequences share blocks, decode refuses to go without a window ("Sliding window unsupported"); one that
        # hides nothing does.
        blocks = torch.cat(used)
        self.window = self.max_seq_len if len(blocks.unique()) < len(blocks) else -1
        self.chosen = "decode" if self.max_query_len == 1 else "varlen"

    def __call__(self) -> None:
        if self.chosen == "decode":
            attention.single_query_cached_kv_attention(
                self.out,
                self.query,
                self.key_cache,
                self.value_cache,
                self.head_mapping,
                self.scale,
                self.tables,
                self.seq_lens,
                self.block_size,
                self.max_seq_len,
                None,
                self.window,
            )
        else:
            attention.flash_attn_varlen_func(
                self.out,
                self.query,
                self.key_cache,
                self.value_cache,
                self.starts,
                self.key_starts,
                self.max_query_len,
                self.max_seq_len,
                self.scale,
                True,
                self.tables,
                None,
            )


serve(f"{ipex.__version__}, {core._get_current_isa_level()}", Work)
