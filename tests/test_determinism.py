"""What is not part of the input is never part of the output, in any bit (rule 5 of the ops).

Not the number of threads, the rest of the batch, where blocks lie, what lies in unused slots and table entries,
or how wide the table is.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import FLOATS, MIXED, Case, Inputs, make_inputs
from compare import assert_same_bits

import paged_kv

# Long enough for several splits; some end just before, at or after one. Decode, chunk and prefill.
LONG = ((1, 2051), (1, 512), (1, 513), (1, 1023), (4, 1540), (0, 700), (30, 1029), (70, 70), (1, 3))

CASES = [
    *[Case(dtype=dtype, seqs=LONG) for dtype in FLOATS],
    *[Case(dtype=dtype, head_dim=128, heads=(8, 2), seqs=LONG, window=600, sinks=0.0) for dtype in FLOATS],
    Case(seqs=MIXED, heads=(3, 3), head_dim=33, softcap=5.0, alibi=True, block_size=3, cache_layout="padded"),
    Case(seqs=LONG, causal=False, dtype=torch.bfloat16, heads=(5, 1), head_dim=80, block_size=128),
    Case(seqs=((1, 5000),), dtype=torch.bfloat16, heads=(1, 1)),
    *[
        Case(seqs=LONG, dtype=torch.bfloat16, cache_dtype=cache, k_scale="token", v_scale="head")
        for cache in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    ],
]


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_same(results, expected, what: str) -> None:
    for name, result, original in zip(("out", "lse"), results, expected, strict=True):
        assert_same_bits(result, original, f"{what}: {name}")


def without(inputs: Inputs, order: list[int]) -> dict:
    """The arguments of a call over some of the sequences, in this order."""
    args = inputs.args
    starts = args["query_start_loc"].tolist()
    lens = torch.tensor([0] + [starts[s + 1] - starts[s] for s in order])
    index = torch.tensor(order, dtype=torch.long, device=args["query"].device)
    seq_lens = args["seq_lens"][index]
    return args | {
        "query": torch.cat([args["query"][starts[s] : starts[s + 1]] for s in order]),
        "block_tables": args["block_tables"][index],
        "seq_lens": seq_lens,
        "query_start_loc": lens.cumsum(0).to(torch.int32).to(index.device),
        "max_query_len": int(lens.max()),
        "max_seq_len": int(seq_lens.max()),
    }


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_any_number_of_threads(case: Case, backend) -> None:
    args = make_inputs(case, backend.device).args
    torch.set_num_threads(1)
    expected = backend.ops.paged_attention(**args)
    for num_threads in (2, 3, 5):
        torch.set_num_threads(num_threads)
        for _ in range(2):  # threads finish in a different order each time
            assert_same(backend.ops.paged_attention(**args), expected, f"{num_threads} threads")


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_any_batch(case: Case, backend) -> None:
    """Each sequence alone, and all of them the other way round beside copies of themselves."""
    inputs = make_inputs(case, backend.device)
    out, lse = backend.ops.paged_attention(**inputs.args)
    starts = inputs.args["query_start_loc"].tolist()
    rows = [slice(starts[s], starts[s + 1]) for s in range(len(case.seqs))]
    for s in range(len(case.seqs)):
        alone = backend.ops.paged_attention(**without(inputs, [s]))
        assert_same(alone, (out[rows[s]], lse[rows[s]]), f"sequence {s} alone")
    order = [*reversed(range(len(case.seqs))), 0, *range(len(case.seqs))]
    together = backend.ops.paged_attention(**without(inputs, order))
    expected = torch.cat([out[rows[s]] for s in order]), torch.cat([lse[rows[s]] for s in order])
    assert_same(together, expected, "reversed batch")


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_any_placement_and_poison(case: Case, backend) -> None:
    expected = backend.ops.paged_attention(**make_inputs(case, backend.device).args)
    for placement, poison, width in ((1, "inf", 0), (2, "1e4", 50), (3, "nan", 7)):
        inputs = make_inputs(
            case, backend.device, poison=poison, placement=placement, extra_table_width=width
        )
        what = f"blocks placed anew, poison {poison}, {width} unused table entries"
        assert_same(backend.ops.paged_attention(**inputs.args), expected, what)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_merge_with_any_number_of_threads(dtype: torch.dtype, backend) -> None:
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(500, 8, 40, generator=generator).to(dtype).to(backend.device) for _ in range(2)]
    lses = [torch.randn(500, 8, generator=generator).to(backend.device) for _ in range(2)]
    args = outs[0], lses[0], outs[1], lses[1]
    torch.set_num_threads(1)
    expected = backend.ops.merge_attention_states(*args)
    for num_threads in (2, 3, 5):
        torch.set_num_threads(num_threads)
        assert_same(backend.ops.merge_attention_states(*args), expected, f"{num_threads} threads")
    one_row = backend.ops.merge_attention_states(*(x[77:78] for x in args))
    assert_same(one_row, (expected[0][77:78], expected[1][77:78]), "a row alone")


COUNT_THREADS = """
import os, torch
torch.set_num_threads(1)
import paged_kv
from cases import Case, make_inputs

args = make_inputs(Case(seqs=((1, 50000),), heads=(1, 1), block_size=128)).args
one_out, one_lse = paged_kv.ops.paged_attention(**args)
before = len(os.listdir("/proc/self/task"))
torch.set_num_threads(5)
out, lse = paged_kv.ops.paged_attention(**args)
after = len(os.listdir("/proc/self/task"))
assert torch.equal(out, one_out) and torch.equal(lse, one_lse)
print(after - before)
"""


@pytest.mark.parametrize("isa", paged_kv.build_info().isas_supported)
def test_one_long_sequence_is_split_over_threads(isa: str) -> None:
    """In a process of its own, where no one else starts threads: one head of one sequence takes all five."""
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS],
        env=os.environ | {"PYTHONPATH": path, "PAGED_KV_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == 4
