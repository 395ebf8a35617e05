"""The CUDA kernels in the build that watches every access: no races, and no byte read that is not needed.

A race, a barrier that not all threads reach, or an access outside of shared memory ends the launch with an error, so
that any call through this build is a test. tests/cuda_on_cpu/faults.py puts faults into the kernels and asks these
tests to find them.
"""

import cuda_on_cpu
import pytest
import test_attention as shared_tests
import torch
from cases import Case, make_inputs
from conftest import Backend

from paged_kv import reference

BACKEND = Backend("cuda_checked", ops=cuda_on_cpu.load_ops(cuda_on_cpu.CHECKED))
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

ATTENTION = {
    "decode": Case(seqs=((1, 600), (1, 40), (1, 1)), dtype=BF16, heads=(4, 1)),
    "decode_float32": Case(seqs=((1, 530), (1, 40), (1, 1)), heads=(4, 2), head_dim=40),
    "prefill": Case(seqs=((70, 90), (20, 20), (1, 9)), dtype=F16, heads=(2, 1)),
    "window": Case(seqs=((30, 200), (1, 150)), dtype=BF16, window=40),
    "many_heads": Case(seqs=((1, 60), (2, 30)), dtype=F16, heads=(72, 1)),
    "quantised": Case(
        seqs=((1, 70), (20, 40)),
        dtype=BF16,
        cache_dtype=torch.float8_e4m3fn,
        k_scale="token",
        v_scale="token",
    ),
    "broken": Case(seqs=((20, 70),), dtype=BF16, broken="v"),
    "broken_float32": Case(seqs=((20, 70),), heads=(2, 2), broken="v"),
    "sinks": Case(seqs=((1, 40), (20, 30)), dtype=F16, sinks=0.0, softcap=20.0, alibi=True),
}


@pytest.mark.parametrize("seed", ["0", "7"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_ON_CPU_SEED", seed)
    shared_tests.check(ATTENTION[name], BACKEND)


def test_far_blocks() -> None:
    shared_tests.test_offsets_beyond_32_bits(BACKEND)


@pytest.mark.parametrize("tokens", [2, 32])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_infinity(dtype: torch.dtype, cache_dtype: torch.dtype | None, tokens: int) -> None:
    seqs = ((tokens, 530),)
    shared_tests.test_no_weight_is_too_small_for_an_infinite_value(
        dtype, cache_dtype, seqs, 1e6, -torch.inf, BACKEND
    )
    shared_tests.test_a_score_of_minus_infinity_makes_nan_of_an_infinite_value(
        dtype, cache_dtype, 0.0, seqs, BACKEND
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_broken_scales(dtype: torch.dtype) -> None:
    shared_tests.test_a_value_scale_that_is_not_finite(
        dtype, torch.float8_e4m3fn, torch.nan, ((20, 20),), BACKEND
    )


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_light_tokens(cache_dtype: torch.dtype | None) -> None:
    shared_tests.test_many_light_tokens_count_beside_a_heavy_one(F16, cache_dtype, BACKEND)


@pytest.mark.parametrize("head_dim", [64, 40, 33])
@pytest.mark.parametrize("cache_dtype", [BF16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_cache_ops(cache_dtype: torch.dtype, head_dim: int) -> None:
    """Written with and without computed scales, gathered, and copied, as the reference does."""
    generator = torch.Generator().manual_seed(head_dim)
    key, value = (torch.randn(9, 3, head_dim, generator=generator).to(BF16) for _ in "kv")
    slots = torch.tensor([5, -1, 17, 0, 30, -7, 12, 31, 8])
    tables = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    lens = torch.tensor([11, 7], dtype=torch.int32)
    mapping = torch.tensor([[0, 5], [3, 4]])
    quantised = cache_dtype != BF16
    results = []
    for ops in (BACKEND.ops, reference):
        before = torch.Generator().manual_seed(2)
        caches = [
            torch.randint(-3, 4, (6, 3, 8, head_dim), generator=before).float().to(cache_dtype) for _ in "kv"
        ]
        scales = [torch.rand(6, 3, 8, generator=torch.Generator().manual_seed(1)) + 0.5 for _ in "kv"]
        given = {"k_scale": scales[0], "v_scale": scales[1]} if quantised else {}
        ops.reshape_and_cache(key, value, *caches, slots, **given)
        written = [c.clone() for c in caches]
        if quantised:
            ops.reshape_and_cache_dynamic(key, value, *caches, slots, *scales)
        gathered = ops.gather_kv(*caches, tables, lens, **given)
        ops.copy_blocks([caches[0], scales[0]], [caches[1], scales[1]], mapping)
        results.append([*written, *caches, *scales, *gathered])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got.to(F32), want.to(F32))


def test_merge() -> None:
    out_a, out_b = (torch.randn(5, 3, 40).to(BF16) for _ in "ab")
    lse_a, lse_b = torch.randn(5, 3), torch.randn(5, 3)
    lse_a[2], lse_b[3] = -torch.inf, -torch.inf
    out, lse = BACKEND.ops.merge_attention_states(out_a, lse_a, out_b, lse_b)
    exact_out, exact_lse = reference.merge_attention_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out.double(), exact_out, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cache_dtype", [BF16, torch.int8], ids=str)
@pytest.mark.parametrize("window", [-1, 333])
def test_decode_reads_each_key_and_value_once(window: int, cache_dtype: torch.dtype) -> None:
    case = Case(
        seqs=((1, 700), (1, 130)),
        heads=(8, 2),
        head_dim=128,
        dtype=BF16,
        cache_dtype=cache_dtype,
        window=window,
    )
    inputs = make_inputs(case)
    checker = cuda_on_cpu.Checker()
    checker.reset(inputs.args["key_cache"], inputs.args["value_cache"])
    BACKEND.ops.paged_attention(**inputs.args)
    read = next(counts["watched"] for name, counts in checker.report().items() if "tensor_kernel" in name)
    keys = sum(min(length, window) if window > 0 else length for _, length in case.seqs)
    needed = 2 * keys * case.heads[1] * case.head_dim * torch.empty(0, dtype=cache_dtype).element_size()
    assert read["bytes"] <= 1.02 * needed
    assert read["bytes"] >= 0.95 * 32 * read["sectors"]
