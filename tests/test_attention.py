"""paged_attention against its float64 definition, with PyTorch's own error as the measure."""

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf, isfinite, nan

import pytest
import torch
from cases import (
    CORNER,
    CORRECT,
    FLOATS,
    MIXED,
    QUANTISED,
    Case,
    Inputs,
    make_inputs,
    pytorch_attention,
    row_view,
)
from compare import assert_close, assert_same_bits, error_of

from paged_kv import reference

GUARD = 12288.0  # exact in every dtype


@dataclass
class Expected:
    """The float64 result of a case, and the largest errors that PyTorch makes in the case's dtype."""

    out: torch.Tensor
    lse: torch.Tensor
    out_error: float
    lse_error: float


@cache
def expected(case: Case) -> Expected:
    """The same for every backend."""
    out, lse = reference.paged_attention(**make_inputs(case).args)
    if case.broken:  # PyTorch would spread the NaN over rows that do not see them
        whole = expected(replace(case, broken=""))
        return Expected(out, lse, whole.out_error, whole.lse_error)
    peer_out, peer_lse = pytorch_attention(make_inputs(case))
    return Expected(
        out, lse, error_of(peer_out, out, f"{case}: out"), error_of(peer_lse, lse, f"{case}: lse")
    )


def guarded_out(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Strided out and lse inside larger tensors full of GUARD."""
    shape = (case.num_tokens, case.heads[0], case.head_dim)
    out = row_view(shape, case.dtype, {"packed": "padded"}.get(case.query_layout, "packed"), GUARD, device)
    lse = torch.full((case.heads[0] + 1, case.num_tokens + 1), GUARD, device=device)[1:, 1:].T
    return out, lse


def assert_guards_stand(view: torch.Tensor, what: str) -> None:
    """Everything in the view's storage but the view itself still holds GUARD."""
    storage = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    inside = torch.zeros_like(storage, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    touched = ~inside & (storage != GUARD)
    assert not touched.any(), (
        f"{what}: {int(touched.sum())} elements written outside, first {int(touched.nonzero()[0])}"
    )


def check(case: Case, backend) -> None:
    exact = expected(case)
    out, lse = guarded_out(case, backend.device)
    inputs = make_inputs(case, backend.device)
    given = {name: t.clone() for name, t in inputs.args.items() if isinstance(t, torch.Tensor)}
    backend.ops.paged_attention(**inputs.args, out=out, lse=lse)
    assert_close(out, exact.out, exact.out_error, f"{case}: out")
    assert_close(lse, exact.lse, exact.lse_error, f"{case}: lse")
    assert_guards_stand(out, f"{case}: out")
    assert_guards_stand(lse, f"{case}: lse")
    for name, before in given.items():
        assert_same_bits(inputs.args[name], before, f"{case}: argument {name}")


@pytest.mark.parametrize("case", CORRECT, ids=repr)
def test_correct(case: Case, backend) -> None:
    check(case, backend)


@pytest.mark.parametrize("case", CORNER, ids=repr)
def test_corner(case: Case, backend) -> None:
    check(case, backend)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_allocating_call_equals_out(dtype: torch.dtype, backend) -> None:
    case = Case(dtype=dtype, head_dim=80)
    out, lse = guarded_out(case, backend.device)
    inputs = make_inputs(case, backend.device)
    backend.ops.paged_attention(**inputs.args, out=out, lse=lse)
    new_out, new_lse = backend.ops.paged_attention(**inputs.args)
    assert new_out.is_contiguous() and new_lse.dtype == torch.float32
    assert_same_bits(new_out, out, f"{case}: out")
    assert_same_bits(new_lse, lse, f"{case}: lse")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_that_sees_no_key_gives_zero_and_minus_inf(dtype: torch.dtype, backend) -> None:
    case = Case(dtype=dtype, seqs=((2, 0), (4, 2)), sinks=0.0)
    out, lse = backend.ops.paged_attention(**make_inputs(case, backend.device).args)
    sees_none = torch.tensor([True, True, True, True, False, False])
    assert_same_bits(out[sees_none], torch.zeros(4, 4, 64, dtype=dtype), "out")
    assert torch.equal(lse.cpu().isneginf().all(dim=1), sees_none)


def test_blocks_before_the_window_are_never_read(backend) -> None:
    """Neither they nor their table entries: the block manager has given them away."""
    case = Case(seqs=((1, 200), (5, 100)), window=20, block_size=8)
    inputs = make_inputs(case, backend.device)
    out, lse = backend.ops.paged_attention(**inputs.args)
    tables = inputs.args["block_tables"]
    tables[0, : (200 - 20) // 8] = 2**31 - 1
    tables[1, : (100 - 5 - 20 + 1) // 8] = -1
    assert_same_bits(backend.ops.paged_attention(**inputs.args)[0], out, "out")
    assert_same_bits(backend.ops.paged_attention(**inputs.args)[1], lse, "lse")


@pytest.mark.parametrize("causal", [True, False])
def test_the_largest_window_hides_nothing(backend, causal) -> None:
    """Not from rows before all keys either, whose positions are negative."""
    inputs = make_inputs(Case(seqs=((20, 1), (3, 40)), causal=causal), backend.device)
    out, lse = backend.ops.paged_attention(**inputs.args)
    args = inputs.args | {"window": 2**63 - 1}
    assert_same_bits(backend.ops.paged_attention(**args)[0], out, "out")
    assert_same_bits(backend.ops.paged_attention(**args)[1], lse, "lse")


def test_two_sequences_may_share_blocks(backend) -> None:
    case = Case(seqs=((1, 45), (1, 45)), dtype=torch.float32)
    inputs = make_inputs(case, backend.device)
    inputs.args["block_tables"][1] = inputs.args["block_tables"][0]
    inputs.args["query"][1] = inputs.args["query"][0]
    out, lse = backend.ops.paged_attention(**inputs.args)
    assert_same_bits(out[1], out[0], "out")
    assert_same_bits(lse[1], lse[0], "lse")


def test_offsets_beyond_32_bits(backend) -> None:
    """The used blocks lie beyond element 2**31 of a cache whose other pages are never touched."""
    case = Case(seqs=((1, 40), (3, 17)), cache_dtype=torch.int8, heads=(2, 1), cache_layout="hnd")
    inputs = make_inputs(case, backend.device)
    exact = expected(case)
    num_blocks, heads, block_size, head_dim = inputs.args["key_cache"].shape
    bytes_per_block = heads * block_size * head_dim
    first = 2**31 // bytes_per_block
    far = {}
    for name in ("key_cache", "value_cache"):
        shape = (first + num_blocks, heads, block_size, head_dim)
        far[name] = torch.empty(shape, dtype=torch.int8, device=backend.device)
        far[name][first:] = inputs.args[name]
    tables = inputs.args["block_tables"]
    args = (
        inputs.args
        | far
        | {"block_tables": torch.where((tables >= 0) & (tables < num_blocks), tables + first, -7)}
    )
    assert_close(backend.ops.paged_attention(**args)[0], exact.out, exact.out_error, "out")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_larger_bounds_change_nothing(dtype: torch.dtype, backend) -> None:
    inputs = make_inputs(Case(dtype=dtype, block_size=8), backend.device)
    out, lse = backend.ops.paged_attention(**inputs.args)
    bounds = {"max_query_len": 1000, "max_seq_len": inputs.args["block_tables"].shape[1] * 8}
    again_out, again_lse = backend.ops.paged_attention(**inputs.args | bounds)
    assert_same_bits(again_out, out, "out")
    assert_same_bits(again_lse, lse, "lse")


@pytest.mark.parametrize("where", ["key_cache", "value_cache"])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "token"), [(40, 21), (300, 150)])
def test_a_bad_token_reaches_only_rows_that_see_it(
    where: str, bad: float, dtype: torch.dtype, tokens: int, token: int, backend
) -> None:
    """Row i of a causal prefill sees tokens 0..i: rows before the bad token must not notice it in any bit."""
    case = Case(seqs=((tokens, tokens),), heads=(2, 2), block_size=16, dtype=dtype)
    inputs = make_inputs(case, backend.device)
    out, lse = backend.ops.paged_attention(**inputs.args)
    block = int(inputs.args["block_tables"][0, token // 16])
    inputs.args[where][block, :, token % 16] = bad
    bad_out, bad_lse = backend.ops.paged_attention(**inputs.args)
    assert_same_bits(bad_out[:token], out[:token], "out before the token")
    assert_same_bits(bad_lse[:token], lse[:token], "lse before the token")
    if where == "value_cache":
        expected_out = torch.full_like(bad_out[token:], bad)
        assert torch.equal(bad_out[token:].isnan(), expected_out.isnan())
        assert torch.equal(bad_out[token:] == bad, expected_out == bad)
        assert_same_bits(bad_lse, lse, "lse")
    elif bad != bad:
        assert bad_out[token:].isnan().all() and bad_lse[token:].isnan().all()


@pytest.mark.parametrize("tokens", [1, 2, 32], ids=["decode", "drafts", "prefill"])
@pytest.mark.parametrize("query_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_every_byte_is_the_number_it_stands_for(
    dtype: torch.dtype, query_dtype: torch.dtype, tokens: int, backend
) -> None:
    """Sequence i has byte i in each of its equal keys, and all bytes in its equal values."""
    codes = torch.arange(256).to(torch.uint8)
    numbers = codes.view(dtype).double()
    dims = torch.arange(256)
    keys, values = torch.zeros(2, 256, 1, 4 * tokens, 256, dtype=torch.uint8)
    keys[dims, :, :, dims] = codes[:, None, None]
    values[:] = codes[(dims[:, None] + dims) % 256][:, None, None]

    def attention(keys: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = backend.ops.paged_attention(
            torch.ones(256 * tokens, 1, 256, dtype=query_dtype, device=backend.device),
            keys.view(dtype).to(backend.device),
            values.view(dtype).to(backend.device),
            torch.arange(256, dtype=torch.int32, device=backend.device)[:, None],
            torch.full((256,), 4 * tokens, dtype=torch.int32, device=backend.device),
            torch.arange(257, dtype=torch.int32, device=backend.device) * tokens,
            max_query_len=tokens,
            max_seq_len=4 * tokens,
            scale=1.0,
            causal=window > 0,
            window=window,
        )
        return out[:, 0].cpu().double().view(256, tokens, 256), lse.cpu().double().view(256, tokens)

    out, _ = attention(torch.zeros_like(keys), window=-1)  # the mean of equal values, in pairs and alone
    exact = numbers[values[:, 0, :1].long()].expand(out.shape)
    assert torch.equal(out.nan_to_num(12345.0), exact.nan_to_num(12345.0))
    _, lse = attention(keys, window=1)  # the only score
    exact = numbers[:, None].expand(lse.shape)
    usual = ~exact.isinf()
    assert torch.equal(lse[usual].nan_to_num(12345.0), exact[usual].nan_to_num(12345.0))


@pytest.mark.parametrize("bad", [inf, -inf])
@pytest.mark.parametrize("sinks", [None, 1e6])
@pytest.mark.parametrize("seqs", [((1, 40),), ((32, 40),), ((2, 1100),)], ids=["decode", "prefill", "splits"])
@pytest.mark.parametrize("cache", [None, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_weight_is_too_small_for_an_infinite_value(
    dtype: torch.dtype, cache: torch.dtype | None, seqs, sinks: float | None, bad: float, backend
) -> None:
    """The first token's, e^-49152 of all others', which float64 takes for zero, and less with its scale."""
    case = Case(seqs=seqs, heads=(2, 1), dtype=dtype, cache_dtype=cache, sinks=sinks)
    args = make_inputs(replace(case, v_scale="token" if cache else "none"), backend.device).args
    block, stored = args["block_tables"][0, 0], case.stored_dtype
    args["query"].fill_(1)
    args["key_cache"].copy_(torch.zeros(args["key_cache"].shape))
    args["key_cache"][block, :, 0] = torch.full((case.head_dim,), -6144.0, device=backend.device).to(stored)
    args["value_cache"][block, :, 0, 5] = torch.tensor(bad, device=backend.device).to(stored)
    for scale in (2.0**-20, 2.0**-30, -(2.0**-100), 0.0) if cache else (1.0,):
        if cache:
            args["v_scale"].fill_(scale)
        out, lse = backend.ops.paged_attention(**args)
        if scale:
            assert (out[..., 5] == bad * scale).all(), scale
        else:
            assert out[..., 5].isnan().all()
        out[..., 5] = 0
        assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("seqs", [((1, 40),), ((32, 40),), ((2, 1100),)], ids=["decode", "prefill", "splits"])
@pytest.mark.parametrize("keys", ["inf", "-inf", "all -inf", "inf and nan"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinite_scores(dtype: torch.dtype, keys: str, seqs, backend) -> None:
    """Those of +inf make the LSE infinite and the output NaN; those of -inf weigh 0."""
    for sinks in (None, 0.0, inf, -inf):
        args = make_inputs(Case(seqs=seqs, heads=(2, 1), dtype=dtype, sinks=sinks), backend.device).args
        args["query"].fill_(1)
        slot = args["block_tables"][0, 0], slice(None), 3
        if keys == "all -inf":
            args["key_cache"].fill_(-inf)
        else:
            args["key_cache"][slot] = float(keys.split()[0])
        if keys == "inf and nan":
            args["key_cache"][args["block_tables"][0, 1], :, 2] = nan
        out, lse = backend.ops.paged_attention(**args)
        exact_out, exact_lse = reference.paged_attention(**args)
        assert_close(out, exact_out, 0.02, f"sinks {sinks}: out")
        assert_close(lse, exact_lse, 0.02, f"sinks {sinks}: lse")


@pytest.mark.parametrize("seqs", [((1, 40),), ((40, 40),), ((2, 1100),)], ids=["decode", "prefill", "splits"])
@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("cache", [None, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_score_of_minus_infinity_makes_nan_of_an_infinite_value(
    dtype: torch.dtype, cache: torch.dtype | None, softcap: float, seqs, backend
) -> None:
    """0 * inf, beside a token whose weight is merely small; a softcap leaves no score infinite."""
    for bad in (inf, -inf):
        case = Case(seqs=seqs, heads=(4, 2), dtype=dtype, cache_dtype=cache, softcap=softcap)
        args = make_inputs(case, backend.device).args
        args["query"].fill_(1)
        # A key of -32 has a score of -256, whose weight of e^-256 is 0 in float32.
        for token, key, dims in ((2, -inf, (0, 2)), (7, -32.0, (1, 2))):
            slot = args["block_tables"][0, 0], slice(None), token
            args["key_cache"][slot] = torch.full((2, 64), key, device=backend.device).to(case.stored_dtype)
            for d in dims:
                args["value_cache"][(*slot, d)] = torch.tensor(bad, device=backend.device).to(
                    case.stored_dtype
                )
        out, lse = backend.ops.paged_attention(**args)
        exact_out, exact_lse = reference.paged_attention(**args)
        assert_close(out, exact_out, 0.02, "out")
        assert_close(lse, exact_lse, 0.02, "lse")


@pytest.mark.parametrize("seqs", [((1, 40),), ((40, 40),), ((2, 1100),)], ids=["decode", "prefill", "splits"])
@pytest.mark.parametrize("scale", [inf, -inf, nan])
@pytest.mark.parametrize("cache", QUANTISED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_value_scale_that_is_not_finite(
    dtype: torch.dtype, cache: torch.dtype, scale: float, seqs, backend
) -> None:
    """That of a token whose weight is e^-256, 0 in float32, reaches every row that sees it, and no other."""
    case = Case(seqs=seqs, heads=(4, 2), dtype=dtype, cache_dtype=cache, v_scale="token")
    args = make_inputs(case, backend.device).args
    args["query"].fill_(1)
    slot = args["block_tables"][0, 0], slice(None), 7
    args["key_cache"][slot] = torch.full((2, 64), -32.0, device=backend.device).to(cache)
    args["value_cache"][(*slot, 0)] = torch.zeros(2, device=backend.device).to(cache)
    args["v_scale"][slot] = scale
    out, lse = backend.ops.paged_attention(**args)
    exact_out, exact_lse = reference.paged_attention(**args)
    assert_close(out, exact_out, 0.02, "out")
    assert_close(lse, exact_lse, 0.02, "lse")


@pytest.mark.parametrize("seqs", [((1, 600),), ((20, 45),)], ids=["decode", "prefill"])
@pytest.mark.parametrize("rule", ["plain", "alibi", "softcap", "sinks"])
@pytest.mark.parametrize("cache", [None, *QUANTISED], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_of_huge_scores_weighs_one(
    dtype: torch.dtype, cache: torch.dtype | None, rule: str, seqs, backend
) -> None:
    """Scores of about 2^40, one alone, or all alike: no rounding may tell the largest from itself."""
    for sign, alike in product((1.0, -1.0), (False, True)):
        case = Case(seqs=seqs, heads=(2, 1), dtype=dtype, cache_dtype=cache, alibi=rule == "alibi")
        args = make_inputs(case, backend.device).args
        keys = torch.full(args["key_cache"].shape, sign)
        if not alike:
            keys[args["block_tables"][0, 1], :, 2] += 1
        args["key_cache"].copy_(keys)
        args["query"].fill_(3)
        args["scale"] = 1.1 * 2.0**33
        args["softcap"] = 1.3 * 2.0**38 if rule == "softcap" else 0.0
        if rule == "sinks":
            args["sinks"] = torch.tensor([0.3 * 2.0**33, -(2.0**50)], device=backend.device)
        out, lse = backend.ops.paged_attention(**args)
        exact_out, exact_lse = reference.paged_attention(**args)
        assert_close(lse, exact_lse, 1e-6 * float(exact_lse.abs().max()), "lse")
        if rule != "alibi":  # whose slopes float32 cannot add to such scores
            assert_close(out, exact_out, 0.02, "out")
        assert out.isfinite().all()


@pytest.mark.parametrize("cache", [None, *QUANTISED], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_many_light_tokens_count_beside_a_heavy_one(
    dtype: torch.dtype, cache: torch.dtype | None, backend
) -> None:
    """As the first token of a prompt often is: e^20 times the weight of each other, its value zero."""
    case = Case(seqs=((1, 2000), (20, 2000)), heads=(2, 1), dtype=dtype, cache_dtype=cache)
    args = make_inputs(case, backend.device).args
    args["query"].fill_(1)
    args["key_cache"].copy_(torch.zeros(args["key_cache"].shape))
    args["value_cache"].copy_(torch.full(args["value_cache"].shape, 100.0))
    zeros = torch.zeros(case.head_dim, device=backend.device)
    for block in args["block_tables"][:, 0]:
        args["key_cache"][block, :, 0] = (zeros + 1).to(case.stored_dtype)
        args["value_cache"][block, :, 0] = zeros.to(case.stored_dtype)
    args["scale"] = 20 / case.head_dim
    out, _ = backend.ops.paged_attention(**args)
    exact, _ = reference.paged_attention(**args)
    assert_close(out, exact, 0.01 * float(exact.max()), "out")


@pytest.mark.parametrize("seqs", [((1, 30),), ((20, 45),)], ids=["decode", "prefill"])
@pytest.mark.parametrize("exponent", [121, -90])
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_scales_reach_as_far_as_float32(
    dtype: torch.dtype, query_dtype: torch.dtype, exponent: int, seqs, backend
) -> None:
    """Powers of two change no bit but the exponent's, and here cancel out."""
    case = Case(seqs=seqs, dtype=query_dtype, cache_dtype=dtype, integers=True)
    inputs = make_inputs(case, backend.device)
    usual = backend.ops.paged_attention(**inputs.args)
    large, half = 2.0**exponent, 2.0 ** (exponent // 2)
    args = inputs.args | {
        "query": inputs.args["query"] / large,
        "scale": inputs.args["scale"] * half,
        "k_scale": torch.full((1,), large / half, device=backend.device),
        "v_scale": torch.full((1,), large, device=backend.device),
    }
    out, lse = backend.ops.paged_attention(**args)
    assert_same_bits(out / large, usual[0], "out")
    assert_same_bits(lse, usual[1], "lse")


@pytest.mark.parametrize("seqs", [((1, 200),), ((3, 90),)], ids=["decode", "drafts"])
@pytest.mark.parametrize("fault", [0.0, 2.0**-100, 2.0**100, inf, nan])
def test_a_row_that_16_bit_integers_cannot_hold_is_right_and_alone(fault: float, seqs, backend) -> None:
    """bfloat16 queries over int8 may be taken as integers in units of their row; other rows stay as they are."""
    inputs = make_inputs(Case(seqs=seqs, dtype=torch.bfloat16, cache_dtype=torch.int8), backend.device)
    usual, usual_lse = backend.ops.paged_attention(**inputs.args)
    query = inputs.args["query"].clone()
    if isfinite(fault):
        query[0, 1] *= fault
    else:
        query[0, 1, 3] = fault
    out, lse = backend.ops.paged_attention(**inputs.args | {"query": query})
    exact_out, exact_lse = reference.paged_attention(**inputs.args | {"query": query})
    assert_close(out[0, 1], exact_out[0, 1], 0.005, "out")
    assert torch.equal(lse[0, 1].isfinite().cpu(), exact_lse[0, 1].isfinite().cpu())
    for actual, expected_rows in ((out, usual), (lse, usual_lse)):
        actual[0, 1] = expected_rows[0, 1] = 0
        assert_same_bits(actual, expected_rows, "the other rows")


@pytest.mark.parametrize("scale", ["tensor", "token"])
def test_values_count_beside_a_token_whose_value_is_zero(scale: str, backend) -> None:
    """A key with e^9 times the weight of others, or a value scale far above all others, with a value of zero: what
    the other 99 tokens add is the whole output, and no smaller than it is."""
    case = Case(seqs=((1, 100),), dtype=torch.bfloat16, cache_dtype=torch.int8, k_scale=scale, v_scale=scale)
    args = make_inputs(case, backend.device).args
    block, slot = args["block_tables"][0, 5 // case.block_size], 5 % case.block_size
    args["value_cache"][block, :, slot] = 0
    if scale == "token":
        args["v_scale"][block, :, slot] *= 1e7  # so that 16 bits from there on hold nothing else
    else:
        query = args["query"][0].view(case.heads[1], -1, case.head_dim)[:, 0].float()
        key = (query / query.abs().amax(1, True) * 127).to(torch.int8)
        args["key_cache"][block, :, slot] = key
        args["scale"] = 9 / float(((query * key).sum(1) * args["k_scale"]).max())
    out, _ = backend.ops.paged_attention(**args)
    exact, _ = reference.paged_attention(**args)
    for head in range(case.heads[0]):
        assert_close(out[:, head], exact[:, head], 0.01 * float(exact[:, head].abs().max()), f"head {head}")


def test_the_measure_notices_a_fault() -> None:
    """The comparison itself: a result slightly wrong in one place fails, and the message tells where."""
    exact = expected(Case())
    assert_close(exact.out.float(), exact.out, exact.out_error, "out")
    for index, wrong in (((3, 1, 5), 1e-5), ((0, 0, 0), nan), ((20, 3, 63), inf)):
        out = exact.out.float()
        out[index] += wrong
        with pytest.raises(AssertionError, match=re.escape(f"1 of {out.numel()} elements; worst at {index}")):
            assert_close(out, exact.out, exact.out_error, "out")
    lse = exact.lse.float()
    lse[0, 0] = -inf
    with pytest.raises(AssertionError, match="inf and NaN differ"):
        assert_close(lse, exact.lse, exact.lse_error, "lse")
    with pytest.raises(AssertionError, match="is the test right"):
        error_of(exact.out.float() + 0.1, exact.out, "a wrong reference")


def test_cases_differ_and_cover_what_they_claim() -> None:
    """Two rows with one id would hide one another, and inputs without poison would prove nothing."""
    ids = [repr(case) for case in CORRECT] + [repr(case) for case in CORNER]
    assert len(ids) == len(set(ids))
    inputs: Inputs = make_inputs(replace(Case(), k_scale="none"))
    cache = inputs.args["key_cache"]
    assert torch.equal(~cache[:, 0, :, 0].isnan(), inputs.used)
    assert inputs.used.sum() == sum(seq_len for query_len, seq_len in MIXED if query_len)
