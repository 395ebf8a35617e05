"""merge_attention_states against its float64 definition."""

from math import inf, nan

import pytest
import torch
from cases import FLOATS, Case, make_inputs, row_view
from compare import assert_close, assert_same_bits, error_of

from paged_kv import reference

SHAPES = [(0, 4, 64), (1, 1, 1), (7, 3, 5), (33, 4, 64), (5, 2, 80), (3, 12, 128), (2, 1, 256), (300, 2, 17)]


def states(shape, dtype: torch.dtype, device: str, layout: str = "packed", spread: float = 3.0):
    """Two random states: out_a, lse_a, out_b, lse_b."""
    generator = torch.Generator().manual_seed(sum(shape))
    tensors = []
    for _ in range(2):
        out = row_view(shape, dtype, layout, nan, device)
        out.copy_(torch.randn(shape, generator=generator))
        lse = torch.full((shape[1], shape[0] + 1), nan, device=device)[:, 1:].T
        lse.copy_(torch.randn(shape[:2], generator=generator) * spread)
        tensors += [out, lse]
    return tensors


def plain_merge(out_a, lse_a, out_b, lse_b):
    """What one writes in PyTorch: weights in float32, output rounded to the dtype."""
    lse = torch.logaddexp(lse_a, lse_b)
    out = out_a.float() * (lse_a - lse).exp()[..., None] + out_b.float() * (lse_b - lse).exp()[..., None]
    return out.to(out_a.dtype), lse


def check(args, backend) -> None:
    exact_out, exact_lse = reference.merge_attention_states(*args)
    peer_out, peer_lse = plain_merge(*args)
    out, lse = backend.ops.merge_attention_states(*args)
    assert out.dtype == args[0].dtype and lse.dtype == torch.float32
    assert_close(out, exact_out, error_of(peer_out, exact_out, "out"), "out")
    assert_close(lse, exact_lse, error_of(peer_lse, exact_lse, "lse"), "lse")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["packed", "fused", "head_first", "padded"])
def test_correct(shape, dtype: torch.dtype, layout: str, backend) -> None:
    check(states(shape, dtype, backend.device, layout), backend)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("spread", [0.0, 100.0, 1e30])
def test_lses_far_apart_or_equal(dtype: torch.dtype, spread: float, backend) -> None:
    check(states((20, 4, 40), dtype, backend.device, spread=spread), backend)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 4, 40), (6, 2, 128)], ids=str)
def test_an_empty_state_leaves_the_other_bit_for_bit(shape, dtype: torch.dtype, backend) -> None:
    out_a, lse_a, out_b, lse_b = states(shape, dtype, backend.device)
    out_a[0, 0, 0] = -0.0
    for garbage in (0.0, nan, inf):
        empty, none = torch.full_like(out_b, garbage), torch.full_like(lse_b, -inf)
        for args in ((out_a, lse_a, empty, none), (empty, none, out_a, lse_a)):
            out, lse = backend.ops.merge_attention_states(*args)
            assert_same_bits(out, out_a, f"out beside an empty state of {garbage}")
            assert_same_bits(lse, lse_a, f"lse beside an empty state of {garbage}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_two_empty_states_are_empty(dtype: torch.dtype, backend) -> None:
    out, lse = torch.zeros(5, 2, 33, dtype=dtype), torch.full((5, 2), -inf)
    args = [x.to(backend.device) for x in (out, lse, out, lse)]
    merged_out, merged_lse = backend.ops.merge_attention_states(*args)
    assert_same_bits(merged_out, out, "out")
    assert_same_bits(merged_lse, lse, "lse")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_empty_and_full_rows_mix(dtype: torch.dtype, backend) -> None:
    out_a, lse_a, out_b, lse_b = states((12, 3, 24), dtype, backend.device)
    lse_a[::3], lse_b[1::3] = -inf, -inf
    check((out_a, lse_a, out_b, lse_b), backend)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_stays_in_its_place(dtype: torch.dtype, backend) -> None:
    args = states((8, 2, 33), dtype, backend.device)
    args[0][1, 0, 3], args[2][4, 1, 32], args[2][5, 0, 0] = nan, inf, -inf
    args[1][6, 1] = nan
    exact_out, exact_lse = reference.merge_attention_states(*args)
    out, lse = backend.ops.merge_attention_states(*args)
    assert int(exact_out.isnan().sum()) == 1 + 33 and int(exact_out.isinf().sum()) == 2
    assert torch.equal(out.isnan(), exact_out.isnan()) and torch.equal(lse.isnan(), exact_lse.isnan())
    assert torch.equal(out.isposinf(), exact_out.isposinf())
    assert torch.equal(out.isneginf(), exact_out.isneginf())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinite_values_far_below_and_infinite_lses(dtype: torch.dtype, backend) -> None:
    """An infinite value stays infinite under any weight, those that float64 takes for zero included."""
    args = states((7, 2, 33), dtype, backend.device)
    args[0][:4, 0, 3], args[2][:4, 1, 32] = inf, -inf
    args[1][0], args[3][0] = -500.0, 200.0
    args[1][1], args[3][1] = 200.0, -500.0
    args[1][2], args[1][4], args[3][5], args[3][6] = inf, inf, inf, inf
    args[1][6] = nan
    exact_out, exact_lse = reference.merge_attention_states(*args)
    out, lse = backend.ops.merge_attention_states(*args)
    assert_close(out, exact_out, 0.02, "out")
    assert_close(lse, exact_lse, 1e-5, "lse")
    args[1][0] = -1e30
    out, _ = backend.ops.merge_attention_states(*args)
    assert out[0, 0, 3] == inf and out[0, 1, 32] == -inf


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["packed", "fused", "head_first", "padded"])
def test_out_overload_writes_the_same_bits_and_nothing_else(dtype: torch.dtype, layout: str, backend) -> None:
    shape = (11, 3, 33)
    args = states(shape, dtype, backend.device)
    expected_out, expected_lse = backend.ops.merge_attention_states(*args)
    out = row_view(shape, dtype, layout, 12288.0, backend.device)
    lse = torch.full((shape[0], shape[1] * 2), 12288.0, device=backend.device)[:, ::2]
    backend.ops.merge_attention_states(*args, out=out, lse=lse)
    assert_same_bits(out, expected_out, "out")
    assert_same_bits(lse, expected_lse, "lse")
    for view in (out, lse):
        storage = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
        storage.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(12288.0)
        assert (storage == 12288.0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cut", [16, 48, 96])
def test_merging_attention_over_two_parts_gives_attention_over_both(
    dtype: torch.dtype, cut: int, backend
) -> None:
    """As cascade attention does: new tokens over a shared prefix, which lies wholly before them, and rest.

    The first call has more queries than keys where the prefix is short.
    """
    case = Case(seqs=((30, 110),), dtype=dtype, heads=(4, 2))
    args = make_inputs(case, backend.device).args
    whole_out, whole_lse = reference.paged_attention(**args)
    tables, block_size = args["block_tables"], case.block_size
    before = args | {"seq_lens": torch.full_like(args["seq_lens"], cut), "causal": False, "max_seq_len": cut}
    rest = args | {
        "seq_lens": args["seq_lens"] - cut,
        "block_tables": tables[:, cut // block_size :],
    }
    if cut > 80:  # the cut lies among the new tokens: only rows behind it may see all of the prefix
        query = args["query"][cut - 80 :]
        start = torch.tensor([0, len(query)], dtype=torch.int32, device=backend.device)
        before |= {"query": query, "query_start_loc": start}
        rest |= {"query": query, "query_start_loc": start}
        whole_out, whole_lse = whole_out[cut - 80 :], whole_lse[cut - 80 :]
    states = [
        *backend.ops.paged_attention(**before),
        *backend.ops.paged_attention(**rest),
    ]
    out, lse = backend.ops.merge_attention_states(*states)
    peer_out, peer_lse = plain_merge(*states)
    assert_close(out, whole_out, error_of(peer_out, whole_out, "out"), "out")
    assert_close(lse, whole_lse, error_of(peer_lse, whole_lse, "lse"), "lse")


def test_a_prefix_of_no_keys_changes_nothing(backend) -> None:
    case = Case(seqs=((3, 20), (1, 7)))
    args = make_inputs(case, backend.device).args
    out, lse = backend.ops.paged_attention(**args)
    nothing = args | {"seq_lens": torch.zeros_like(args["seq_lens"]), "causal": False}
    merged = backend.ops.merge_attention_states(*backend.ops.paged_attention(**nothing), out, lse)
    assert_same_bits(merged[0], out, "out")
    assert_same_bits(merged[1], lse, "lse")
