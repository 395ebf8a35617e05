"""What is particular to the CUDA kernels: splits, tiles of rows, the order of threads, errors of the device.

The shared tests run on them through the `backend` fixture; here stand the sizes at which the kernels change what they
do, and that no order in which the threads of a block may run changes a bit.
"""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
from cases import MIXED, Case, make_inputs
from compare import assert_same_bits
from conftest import Backend
from op_mistakes import MISTAKES, VALID
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


LIBRARY = ctypes.CDLL(str(cuda_on_cpu.FOLDER / f"lib{cuda_on_cpu.PLAIN}.so"))
NO_KERNEL_IMAGE, INVALID_VALUE = 209, 1  # cudaErrorNoKernelImageForDevice, cudaErrorInvalidValue


@pytest.mark.parametrize("call", VALID)
def test_an_error_of_the_device_is_raised_once(call: str) -> None:
    """With the op and the size of its main argument; the next call knows nothing of it."""
    op, arguments = call.split()[0], VALID[call]()
    LIBRARY.cuda_on_cpu_fail_next(INVALID_VALUE)
    with pytest.raises(
        RuntimeError, match=rf"^paged_kv::{op}: backend cuda: invalid argument \(\w+ \[[\d, ]+\]\)"
    ):
        getattr(BACKEND.ops, op)(**arguments)
    getattr(BACKEND.ops, op)(**arguments)


def test_a_gpu_without_kernels_is_told_how_to_get_them() -> None:
    LIBRARY.cuda_on_cpu_fail_next(NO_KERNEL_IMAGE)
    with pytest.raises(RuntimeError, match=r"without kernels for this GPU.*build_info.*TORCH_CUDA_ARCH_LIST"):
        BACKEND.ops.paged_attention(**make_inputs(Case()).args)


MISTAKES_IN_CHECKING_MODE = """
import cuda_on_cpu
from op_mistakes import MISTAKES

ops = cuda_on_cpu.load_ops()
for mistake in MISTAKES:
    try:
        getattr(ops, mistake.op)(**mistake.arguments())
        print("no error:", mistake)
    except ValueError as error:
        if str(error) != mistake.message:
            print(mistake, error)
print(len(MISTAKES), "mistakes")
"""

FOREIGN_BLOCKS = """
import cuda_on_cpu
import torch
from op_mistakes import VALID, N

ops = cuda_on_cpu.load_ops()
call = VALID["gather_kv"]()
larger = {name: torch.cat([call[name], call[name].flip(0)]) for name in ("key_cache", "value_cache")}
call["block_tables"] = call["block_tables"] + N
key, value = ops.gather_kv(**call | larger)  # there are such blocks, if not in the caches given next
call |= {name: tensor[:N] for name, tensor in larger.items()}
try:
    print(all(torch.equal(*pair) for pair in zip(ops.gather_kv(**call), (key, value))))
except ValueError as error:
    print(error)
"""


def run(code: str, checks: str) -> str:
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PAGED_KV_CUDA_CHECKS": checks}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def test_the_checking_mode_finds_every_mistake() -> None:
    """PAGED_KV_CUDA_CHECKS=1: the same sentences as on the CPU, those about values on the device included."""
    assert run(MISTAKES_IN_CHECKING_MODE, checks="1") == f"{len(MISTAKES)} mistakes"


def test_values_on_the_device_are_read_in_the_checking_mode_only() -> None:
    assert run(FOREIGN_BLOCKS, checks="") == "True"
    assert run(FOREIGN_BLOCKS, checks="1").startswith("paged_kv::gather_kv: block_tables: expected")
