"""What is particular to the CUDA kernels: splits, tiles of rows, the order of threads.

The shared tests run on them through the `backend` fixture; here stand the sizes at which the kernels change what they
do, and that no order in which the threads of a block may run changes a bit.
"""

from dataclasses import replace

import cuda_on_cpu
import pytest
import torch
from cases import MIXED, Case, make_inputs
from compare import assert_same_bits
from conftest import Backend
from test_attention import check

BACKEND = Backend("cuda_on_cpu", ops=cuda_on_cpu.load_ops())
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SPLIT = 512  # keys

BOUNDARIES = [
    # Decode over one, two and many splits, on tensor cores and off them
    Case(seqs=((1, SPLIT), (1, SPLIT + 1), (1, 3 * SPLIT - 1), (1, 1)), dtype=BF16, head_dim=128),
    Case(seqs=((1, SPLIT), (1, SPLIT + 1), (1, 2 * SPLIT + 77)), heads=(2, 2)),
    Case(seqs=((1, 2 * SPLIT + 5), (1, 40)), dtype=F16, heads=(4, 1), sinks=0.0, softcap=30.0, alibi=True),
    # Some rows of a split sequence see a split that others do not
    Case(seqs=((4, SPLIT + 2),), dtype=BF16, heads=(4, 1)),
    Case(seqs=((4, SPLIT + 2),), heads=(2, 2)),
    # Windows that begin inside, at the end and before the start of a split
    Case(seqs=((1, 1400), (3, 1100), (1, 90)), dtype=BF16, window=500),
    Case(seqs=((1, 2 * SPLIT),), dtype=F16, window=SPLIT, block_size=32),
    Case(seqs=((1, 1300),), window=SPLIT + 1, heads=(2, 1)),
    Case(seqs=((2, 1200),), dtype=BF16, window=300, causal=False),
    # More heads in a group than rows of one product, and than rows of a tile
    Case(seqs=((1, SPLIT + 60), (1, 9)), dtype=BF16, heads=(20, 1)),
    Case(seqs=((1, 100), (2, 70)), dtype=F16, heads=(72, 1)),
    Case(seqs=((1, 70),), heads=(20, 2), head_dim=40),
    # Around 16 rows, up to which a sequence is split
    Case(seqs=((8, 600), (9, 600)), dtype=BF16, heads=(2, 1)),
    # Around the 64 rows of a tile; decode and prefill in one launch
    Case(
        seqs=((16, 16), (17, 80), (33, 33), (1, 600), (0, 5), (1, 1)), dtype=F16, heads=(8, 2), head_dim=128
    ),
    Case(seqs=((70, 70), (40, 90)), dtype=BF16, heads=(2, 1), window=20),
    # Quantised: scales that differ by token, over splits
    Case(
        seqs=((1, SPLIT + 30), (20, 90)),
        dtype=BF16,
        cache_dtype=torch.float8_e4m3fn,
        k_scale="token",
        v_scale="token",
    ),
    Case(
        seqs=((1, SPLIT + 30), (20, 90)), dtype=F16, cache_dtype=torch.int8, k_scale="token", v_scale="head"
    ),
    Case(
        seqs=((1, SPLIT + 30), (20, 90)),
        dtype=F16,
        cache_dtype=torch.float8_e5m2,
        head_dim=256,
        v_scale="tensor",
    ),
]


@pytest.mark.parametrize("case", BOUNDARIES, ids=repr)
def test_boundaries(case: Case) -> None:
    check(case, BACKEND)


ORDERS = [
    Case(dtype=BF16),
    Case(seqs=((1, SPLIT + 9), (20, 40)), dtype=F16, head_dim=128),
    Case(seqs=((2, 9), (20, 33)), dtype=BF16, broken="v"),
    Case(dtype=F16, cache_dtype=torch.float8_e4m3fn, k_scale="token", v_scale="token"),
    Case(),
]


@pytest.mark.parametrize("case", ORDERS, ids=repr)
def test_the_order_of_threads_changes_no_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(case)
    expected = BACKEND.ops.paged_attention(**inputs.args)
    for seed in range(1, 5):
        monkeypatch.setenv("CUDA_ON_CPU_SEED", str(seed))
        for got, want in zip(BACKEND.ops.paged_attention(**inputs.args), expected, strict=True):
            assert_same_bits(got, want, f"seed {seed}")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_decode_row_is_the_same_beside_prefill(dtype: torch.dtype) -> None:
    """One launch serves both; which arithmetic a sequence gets depends on that sequence alone."""
    both = Case(seqs=((1, SPLIT + 50), (30, 60)), dtype=dtype)
    inputs = make_inputs(both)
    out, lse = BACKEND.ops.paged_attention(**inputs.args)
    alone = {
        **inputs.args,
        "query": inputs.args["query"][:1],
        "block_tables": inputs.args["block_tables"][:1],
        "seq_lens": inputs.args["seq_lens"][:1],
        "query_start_loc": inputs.args["query_start_loc"][:2],
        "max_query_len": 1,
    }
    alone_out, alone_lse = BACKEND.ops.paged_attention(**alone)
    assert_same_bits(out[:1], alone_out, "out")
    assert_same_bits(lse[:1], alone_lse, "lse")


def test_a_launch_for_more_than_there_is() -> None:
    """Grids are sized by capacity; blocks without work leave at once."""
    case = replace(Case(dtype=BF16), seqs=MIXED)
    inputs = make_inputs(case)
    expected = BACKEND.ops.paged_attention(**inputs.args)
    inputs.args.update(max_query_len=1000, max_seq_len=20000)
    for got, want in zip(BACKEND.ops.paged_attention(**inputs.args), expected, strict=True):
        assert_same_bits(got, want, "result")
