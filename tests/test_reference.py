"""The definition of right, against things that need no definition: PyTorch's dense attention, search, arithmetic."""

import inspect
from math import inf, log, nan

import pytest
import torch

from paged_kv import ops, reference

# Sequence lengths and query lengths: decode, prefill, chunked prefill, no query, no key, more queries than keys.
SEQS = ((1, 9), (5, 5), (3, 8), (0, 4), (2, 0), (4, 2))
HQ, HKV, D, B = 6, 2, 8, 4


def paged(keys, values):
    """Caches and block tables that hold each sequence's keys and values [n, Hkv, D], blocks in reverse order."""
    num_blocks = sum(-(-len(k) // B) for k in keys) + 1
    caches = [torch.full((num_blocks, HKV, B, D), nan, dtype=torch.float64) for _ in "kv"]
    tables = torch.full((len(keys), 5), 10**6, dtype=torch.int32)
    block = num_blocks
    for seq, rows in enumerate(zip(keys, values, strict=True)):
        for first in range(0, len(rows[0]), B):
            block -= 1
            tables[seq, first // B] = block
            for cache, row in zip(caches, rows, strict=True):
                piece = row[first : first + B]
                cache[block, :, : len(piece)] = piece.transpose(0, 1)
    return *caches, tables


def inputs(seed=0):
    torch.manual_seed(seed)
    queries = [torch.randn(n, HQ, D, dtype=torch.float64) for n, _ in SEQS]
    keys, values = ([torch.randn(n, HKV, D, dtype=torch.float64) for _, n in SEQS] for _ in "kv")
    return queries, keys, values


def attend(queries, keys, values, **options):
    lens = torch.tensor([len(k) for k in keys], dtype=torch.int32)
    starts = torch.tensor([0, *(len(q) for q in queries)]).cumsum(0).to(torch.int32)
    return reference.paged_attention(
        torch.cat(queries), *paged(keys, values), lens, starts, 5, 9, D**-0.5, **options
    )


def dense(queries, keys, values, causal=True, window=-1, softcap=0.0, alibi_slopes=None, sinks=None):
    """All scores of a sequence at once, masked by -inf; a sink is one more key, whose value is zero."""
    outs, lses = [], []
    for q, k, v in zip(queries, keys, values, strict=True):
        k, v = (x.repeat_interleave(HQ // HKV, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * D**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(len(k)) - (len(k) - len(q) + torch.arange(len(q)))[:, None]  # key - query
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[:, None, None] * distance
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            hidden |= distance > 0
        if window > 0:
            hidden |= distance <= -window
        scores = scores.masked_fill(hidden, -inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
            v = torch.cat([v, torch.zeros(1, HQ, D, dtype=v.dtype)])
        blind = hidden.all(dim=1)
        weights = scores.softmax(-1).masked_fill(blind[:, None], 0.0)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        lses.append(scores.logsumexp(-1).masked_fill(blind, -inf).T)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("window", (-1, 1, 3, 100))
@pytest.mark.parametrize("softcap", (0.0, 0.5))
@pytest.mark.parametrize("extras", ((), ("alibi_slopes",), ("sinks",), ("alibi_slopes", "sinks")))
def test_attention_is_dense_attention(causal, window, softcap, extras):
    batch = inputs()
    options = {name: torch.linspace(-1, 2, HQ, dtype=torch.float64) for name in extras}
    options |= {"causal": causal, "window": window, "softcap": softcap}
    out, lse = attend(*batch, **options)
    exact_out, exact_lse = dense(*batch, **options)
    torch.testing.assert_close(out, exact_out, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=1e-13)


def test_attention_is_pytorch_s_own():
    queries, keys, values = inputs()
    out, _ = attend(queries[1:2], keys[1:2], values[1:2])
    q, k, v = (x[1].transpose(0, 1)[None] for x in (queries, keys, values))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, exact[0].transpose(0, 1), rtol=0, atol=1e-13)


def test_rows_that_see_no_key_are_zero_and_minus_infinity_with_a_sink_too():
    queries, keys, values = inputs()
    out, lse = attend(queries, keys, values, sinks=torch.full((HQ,), 3.0))
    blind = [9, 10, 11, 12]  # the two rows over no key; the first two of four rows over two keys
    assert out[blind].eq(0).all()
    assert lse[blind].eq(-inf).all()
    assert lse[[0, 8, 13]].isfinite().all()


def test_only_what_is_seen_is_read():
    """NaN behind the mask reaches no row, and table entries before the window may say anything."""
    queries, keys, values = inputs()
    out, lse = attend(queries, keys, values, window=3)
    key_cache, value_cache, tables = paged(keys, values)
    tables[0, 0] = 10**6  # positions 0 to 3, of which the row at position 8 sees none
    for cache in key_cache, value_cache:
        cache[tables[0, 1], :, :2] = nan  # nor of 4 and 5
    lens = torch.tensor([n for _, n in SEQS])
    starts = torch.tensor([0, *(n for n, _ in SEQS)]).cumsum(0)
    again = reference.paged_attention(
        torch.cat(queries), key_cache, value_cache, tables, lens, starts, 5, 9, D**-0.5, window=3
    )
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


def test_a_nan_value_reaches_the_rows_that_see_it():
    queries, keys, values = inputs()
    values[1][2, 1, 5] = nan  # seen by rows 2, 3 and 4 of the prefill, through query heads 3 to 5
    out, _ = attend(queries, keys, values)
    assert {tuple(i) for i in out.isnan().nonzero().tolist()} == {
        (1 + row, head, 5) for row in (2, 3, 4) for head in (3, 4, 5)
    }


@pytest.mark.parametrize("shape", ((1,), (HKV,), "token"), ids=str)
def test_scales_multiply_keys_and_values(shape):
    queries, keys, values = inputs()
    key_cache, value_cache, tables = paged(keys, values)
    shape = (key_cache.shape[0], HKV, B) if shape == "token" else shape
    k_scale, v_scale = torch.rand(2, *shape) + 0.5
    grid = [s.double()[..., None] if s.dim() == 3 else s.double()[:, None, None] for s in (k_scale, v_scale)]
    args = (tables, torch.tensor([n for _, n in SEQS]), torch.tensor([0, 1, 6, 9, 9, 11, 15]), 5, 9, 0.3)
    query = torch.cat(queries)
    out, lse = reference.paged_attention(
        query, key_cache, value_cache, *args, k_scale=k_scale, v_scale=v_scale
    )
    exact = reference.paged_attention(query, key_cache * grid[0], value_cache * grid[1], *args)
    torch.testing.assert_close(out, exact[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, exact[1], rtol=0, atol=1e-13)


def test_merging_two_halves_is_the_whole():
    queries, keys, values = (x[:1] for x in inputs())
    whole = attend(queries, keys, values)
    halves = [attend(queries, [keys[0][part]], [values[0][part]]) for part in (slice(0, 4), slice(4, 9))]
    out, lse = reference.merge_attention_states(*halves[0], *halves[1])
    torch.testing.assert_close(out, whole[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, whole[1], rtol=0, atol=1e-13)


def test_merging_with_an_empty_state_is_the_other():
    out, lse = torch.randn(3, 2, 4), torch.tensor([[0.0, -inf], [inf, 5.0], [-inf, -3.0]])
    nothing = torch.full_like(out, nan), torch.full_like(lse, -inf)
    for merged in (
        reference.merge_attention_states(out, lse, *nothing),
        reference.merge_attention_states(*nothing, out, lse),
    ):
        seen = ~lse.isneginf()
        assert torch.equal(merged[0][seen], out.double()[seen])
        assert torch.equal(merged[1], lse.double())


def test_merging_by_hand():
    out, lse = reference.merge_attention_states(
        torch.tensor([[[1.0]]]), torch.tensor([[log(3.0)]]), torch.tensor([[[5.0]]]), torch.tensor([[0.0]])
    )
    assert out.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(log(4.0))


@pytest.mark.parametrize("dtype", reference.LARGEST, ids=str)
def test_quantise_finds_the_nearest_code(dtype):
    """By search over all codes; of two equally near ones the even one, whose last bit is 0."""
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    numbers = codes.double()
    usable = numbers.isfinite() & (numbers.abs() <= reference.LARGEST[dtype])
    codes, numbers = codes[usable], numbers[usable]
    torch.manual_seed(0)
    x = torch.cat(
        [torch.randn(2000) * s for s in (1e-3, 1.0, 100.0, 1e5)] + [numbers.float() * 1.5, numbers.float()]
    )
    scale = 0.7
    wanted = (x.double() / scale).float().double()
    distance = (wanted[:, None] - numbers).abs()
    nearest = distance == distance.min(dim=1, keepdim=True).values
    even = codes.view(torch.uint8) % 2 == 0
    best = (nearest.double() + (nearest & even)).argmax(dim=1)
    got = reference.quantise(x, dtype, scale)
    assert torch.equal(got.double(), numbers[best])
    special = reference.quantise(torch.tensor([inf, -inf, nan]), dtype).double()
    assert special[:2].tolist() == [reference.LARGEST[dtype], -reference.LARGEST[dtype]]
    assert special[2] == 0 if dtype == torch.int8 else special[2].isnan()


@pytest.mark.parametrize("dtype", reference.LARGEST, ids=str)
def test_dynamic_scales_fill_the_range(dtype):
    x = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0.0
    scale = reference.dynamic_scale(x, dtype)
    assert scale[0, 0] == 1.0
    stored = reference.quantise(x, dtype, scale[..., None]).double()
    filled = stored.abs().amax(-1) == reference.LARGEST[dtype]
    assert filled.sum() == filled.numel() - 1
    assert not filled[0, 0]


def test_tokens_by_hand():
    key = torch.arange(4.0).reshape(4, 1, 1)
    caches = [torch.full((3, 1, 2, 1), 9.0) for _ in "kv"]
    reference.reshape_and_cache(key, -key, *caches, torch.tensor([3, -1, 0]))
    assert caches[0].flatten().tolist() == [2.0, 9.0, 9.0, 0.0, 9.0, 9.0]
    assert caches[1].flatten().tolist() == [-2.0, 9.0, 9.0, 0.0, 9.0, 9.0]
    tables, lens = torch.tensor([[1, 0], [5, 5], [0, 7]]), torch.tensor([3, 0, 1])
    key, value = reference.gather_kv(*caches, tables, lens)
    assert key.flatten().tolist() == [9.0, 0.0, 2.0, 2.0]
    assert value.flatten().tolist() == [9.0, 0.0, -2.0, -2.0]


def test_scaled_tokens_by_hand():
    caches = [torch.zeros(1, 2, 2, 1, dtype=torch.int8) for _ in "kv"]
    row = torch.tensor([[[10.0], [10.0]]])
    scales = torch.tensor([0.5, 2.0]), torch.tensor([5.0])
    reference.reshape_and_cache(row, row, *caches, torch.tensor([1]), *scales)
    assert caches[0].flatten().tolist() == [0, 20, 0, 5]
    assert caches[1].flatten().tolist() == [0, 2, 0, 2]
    key, value = reference.gather_kv(*caches, torch.tensor([[0]]), torch.tensor([2]), *scales)
    assert key.tolist() == value.tolist() == [[[0.0], [0.0]], [[10.0], [10.0]]]
    assert key.dtype == torch.float32


def test_blocks_by_hand():
    a, b = torch.arange(4.0).reshape(4, 1), torch.arange(8).reshape(4, 2)
    reference.copy_blocks([a], [b], torch.tensor([[0, 3], [0, 1]]))
    assert a.flatten().tolist() == [0.0, 0.0, 2.0, 0.0]
    assert b.tolist() == [[0, 1], [0, 1], [4, 5], [0, 1]]
    there = torch.zeros(2, 2, dtype=torch.int64)
    reference.swap_blocks(b, there, torch.tensor([[2, 1]]))
    assert there.tolist() == [[0, 0], [4, 5]]


@pytest.mark.parametrize("name", ops.__all__)
def test_every_op_has_a_reference_with_its_arguments(name):
    """But for the tensors that an op may be told to write its results to."""
    given = set(inspect.signature(getattr(ops, name)).parameters)
    taken = set(inspect.signature(getattr(reference, name)).parameters)
    results = {"gather_kv": {"key", "value"}}.get(name, {"out", "lse"})
    assert given - taken <= results
    assert taken <= given


def test_the_reference_calls_no_kernel():
    source = inspect.getsource(reference)
    assert "torch.ops" not in source
    assert "from ." not in source
