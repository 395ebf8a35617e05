"""vLLM's CPU attention as a worker (see peers.py), called as vLLM's own backend calls it.

As in vllm/v1/attention/backends/cpu_attn.py: the same cache layout ([num_blocks, num_kv_heads, 2 * block_size,
head_dim], keys before values), the instruction set that `_get_attn_isa` chooses, metadata from its scheduler made once
a step, and keys written by its own op.
"""

import json
import os
import sys
import time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print must not mix with the answers

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: E402

current_platform.import_kernels()


class Work:
    def __init__(self, path: str) -> None:
        case = torch.load(path, mmap=True)
        self.query = case["query"]
        self.scale, self.tables = case["scale"], case["block_tables"]
        self.seq_lens, self.query_start_loc = case["seq_lens"], case["query_start_loc"]
        self.out = torch.empty_like(self.query)
        num_blocks, num_kv_heads, block_size, head_dim = case["cache_shape"]
        cache = torch.zeros(num_blocks, num_kv_heads, 2 * block_size, head_dim, dtype=self.query.dtype)
        self.key_cache, self.value_cache = cache.chunk(2, dim=2)
        self.isa = _get_attn_isa(self.query.dtype, block_size, head_dim, "auto")
        for seq, (key, value) in enumerate(
            zip(case["keys"], case["values"], strict=True)
        ):  # [seq_len, Hkv, D]
            token = torch.arange(len(key))
            slots = self.tables[seq].long()[token // block_size] * block_size + token % block_size
            ops.cpu_attn_reshape_and_cache(
                key.contiguous(), value.contiguous(), self.key_cache, self.value_cache, slots, self.isa
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
            isa=self.isa,
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


def time_calls(call: Work, seconds: float) -> list[float]:
    call()
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


work = None
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
for line in sys.stdin:
    command, argument = json.loads(line)
    if command == "hello":
        answer = vllm.__version__
    elif command == "load":
        work = None  # gives the last case's memory back first
        work = Work(argument)
        answer = work.isa
    elif command == "run":
        work()
        torch.save(work.out, argument)
        answer = argument
    elif command == "time":
        answer = time_calls(work, argument)
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
