"""Attention cases as rows of a frozen dataclass, and the inputs that each row stands for.

Whatever an op must not read is poison: free slots, slots beyond a sequence's length, keys and values that the
mask hides from every row, scales of unused slots, padding between strided rows. Unused table entries hold ids
that would crash. Blocks are handed out in random order.
"""

import os
import zlib
from dataclasses import dataclass, fields, replace
from math import ceil, inf, nan

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# Largest finite value of a quantised format; int8 is symmetric.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
# The byte that plays each poison in a quantised cache: e4m3fn has no inf, int8 neither inf nor NaN.
POISON_BYTE = {
    torch.float8_e4m3fn: {"nan": 0x7F, "inf": 0xFF, "1e4": 0x7E},
    torch.float8_e5m2: {"nan": 0x7F, "inf": 0x7C, "1e4": 0x70},
    torch.int8: {"nan": 0x80, "inf": 0x7F, "1e4": 0x81},
}
UNUSED_TABLE_IDS = (2**31 - 1, -1, -(2**31), 2**30 + 7)

MIXED = ((1, 37), (5, 5), (0, 0), (3, 50), (0, 20), (18, 47), (1, 1))  # decode, prefill, chunk, empty


@dataclass(frozen=True, repr=False)
class Case:
    """One attention call. Its repr, the fields that are not default, is the test id."""

    seqs: tuple[tuple[int, int], ...] = MIXED  # (query_len, seq_len) of each sequence
    heads: tuple[int, int] = (4, 2)  # query heads, key/value heads
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32  # query and out
    cache_dtype: torch.dtype | None = None  # None: that of the query
    k_scale: str = "none"  # none, tensor, head, token
    v_scale: str = "none"
    causal: bool = True
    window: int = -1
    softcap: float = 0.0
    alibi: bool = False
    sinks: float | None = None  # the sinks are this plus standard normal noise
    cache_layout: str = "nhd"  # see cache_views
    query_layout: str = "packed"  # see row_view
    magnitude: float = 1.0  # of queries and keys: scores grow with its square
    integers: bool = False  # small whole numbers, whose products are exact in every dtype and order
    broken: str = ""  # put NaN or inf into keys ("k") or values ("v") that some rows see and others do not

    def __repr__(self) -> str:
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                parts.append(f"{f.name}={str(value).removeprefix('torch.').replace(' ', '')}")
        return ",".join(parts) or "default"

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def num_tokens(self) -> int:
        return sum(query_len for query_len, _ in self.seqs)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass
class Inputs:
    """The keyword arguments of one paged_attention call, and the same keys and values without blocks."""

    case: Case
    args: dict
    keys: list[Tensor]  # per sequence [Hkv, seq_len, D] as stored, scale applied, float64
    values: list[Tensor]
    queries: list[Tensor]  # per sequence [Hq, query_len, D]
    used: Tensor  # bool [N, B]: the slots that some row may read


def visible(case: Case, query_len: int, seq_len: int) -> Tensor:
    """bool [query_len, seq_len]: which keys each query row of a sequence sees."""
    query_pos = seq_len - query_len + torch.arange(query_len)[:, None]
    key_pos = torch.arange(seq_len)[None, :]
    mask = torch.ones(query_len, seq_len, dtype=torch.bool)
    if case.causal:
        mask &= key_pos <= query_pos
    if case.window > 0:
        mask &= key_pos > query_pos - case.window
    return mask


def poison_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: str, poison: str) -> Tensor:
    if dtype in POISON_BYTE:
        return torch.full(shape, POISON_BYTE[dtype][poison], dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, float(poison), dtype=dtype, device=device)


def cache_views(case: Case, num_blocks: int, device: str, poison: str) -> tuple[Tensor, Tensor]:
    """Key and value cache, logically [N, Hkv, B, D], in the strides that the case asks for."""
    n, h, b, d = num_blocks, case.heads[1], case.block_size, case.head_dim

    def storage(*shape: int) -> Tensor:
        return poison_tensor(shape, case.stored_dtype, device, poison)

    match case.cache_layout:
        case "nhd":
            return storage(n, b, h, d).transpose(1, 2), storage(n, b, h, d).transpose(1, 2)
        case "hnd":
            return storage(n, h, b, d), storage(n, h, b, d)
        case "interleaved":  # one tensor [N, 2, B, Hkv, D] for both
            both = storage(n, 2, b, h, d)
            return both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
        case "head_major":  # a head's blocks are neighbours
            return storage(h, n, b, d).transpose(0, 1), storage(h, n, b, d).transpose(0, 1)
        case "padded":  # rows of odd stride at an odd offset, keys and values in different strides
            return storage(n, h, b, d + 3)[..., 1 : d + 1], storage(n, b, h, 2 * d + 5)[
                ..., 5 : d + 5
            ].transpose(1, 2)
    raise ValueError(case.cache_layout)


def row_view(
    shape: tuple[int, int, int], dtype: torch.dtype, layout: str, fill: float, device: str
) -> Tensor:
    """A [tokens, heads, D] tensor full of `fill`, in strides of the layout's kind."""
    t, h, d = shape
    match layout:
        case "packed":
            return torch.full((t, h, d), fill, dtype=dtype, device=device)
        case "fused":  # a slice of a fused query/key/value projection, at an odd offset
            return torch.full((t, (h + 3) * d + 1), fill, dtype=dtype, device=device)[
                :, d + 1 : d + 1 + h * d
            ].unflatten(1, (h, d))
        case "head_first":
            return torch.full((h, t, d), fill, dtype=dtype, device=device).transpose(0, 1)
        case "padded":
            return torch.full((t, h + 1, d + 5), fill, dtype=dtype, device=device)[:, 1:, 3 : d + 3]
    raise ValueError(layout)


def seed_of(case: Case) -> int:
    """The same inputs for the same case, broken or not, unless PAGED_KV_TEST_SEED asks for others."""
    return zlib.crc32(repr(replace(case, broken="")).encode()) + int(
        os.environ.get("PAGED_KV_TEST_SEED", "0")
    )


def random_rows(case: Case, shape: tuple[int, ...], magnitude: float, generator: torch.Generator) -> Tensor:
    if case.integers:
        return torch.randint(-3, 4, shape, generator=generator) * magnitude
    return torch.randn(shape, generator=generator) * magnitude


def random_scale(kind: str, case: Case, num_blocks: int, generator: torch.Generator) -> Tensor | None:
    """Scale that spreads normal values over most of the cache's format, [1 or N, 1 or Hkv, 1 or B]."""
    shape = {
        "tensor": (1, 1, 1),
        "head": (1, case.heads[1], 1),
        "token": (num_blocks, case.heads[1], case.block_size),
    }
    if kind == "none":
        return None
    return (0.5 + torch.rand(shape[kind], generator=generator)) * 4.5 / LARGEST[case.stored_dtype]


def store(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds rows [Hkv, seq_len, D] to a cache dtype."""
    if dtype in LARGEST:
        rows = rows.clamp(-LARGEST[dtype], LARGEST[dtype])
    return rows.round().to(dtype) if dtype == torch.int8 else rows.to(dtype)


def write(cache: Tensor, blocks: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """cache[blocks[i], :, offsets[i]] = rows[:, i], for dtypes that PyTorch cannot index too."""
    if cache.dtype in QUANTISED:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[blocks, :, offsets] = rows.transpose(0, 1).to(cache.device)


def break_rows(keys: Tensor, values: Tensor, what: str) -> None:
    """Puts NaN and inf at one token in three, in a different dimension each time."""
    bad = (nan, inf, -inf, nan)
    for i, token in enumerate(range(1, keys.shape[1], 3)):
        if "k" in what and i % 2 == 0:
            keys[:, token, i % keys.shape[2]] = bad[
                i // 2 % 2 * 3
            ]  # NaN only: an infinite score has no softmax
        if "v" in what:
            values[:, token, (2 * i) % values.shape[2]] = bad[i % 4]


def hidden(case: Case, query_len: int, seq_len: int) -> Tensor:
    """bool [seq_len]: keys that no row of the sequence sees."""
    return ~visible(case, query_len, seq_len).any(dim=0)


def make_inputs(
    case: Case, device: str = "cpu", *, poison: str = "nan", placement: int = 0, extra_table_width: int = 3
) -> Inputs:
    """Inputs of a case. `poison`, `placement` and `extra_table_width` change nothing an op depends on."""
    generator = torch.Generator().manual_seed(seed_of(case))
    place = torch.Generator().manual_seed(placement)
    num_q_heads, num_kv_heads = case.heads
    widths = [ceil(seq_len / case.block_size) for _, seq_len in case.seqs]
    num_blocks = sum(widths) + 5
    order = torch.randperm(num_blocks, generator=place)
    width = max(widths, default=0) + extra_table_width

    key_cache, value_cache = cache_views(case, num_blocks, device, poison)
    # A token's scale belongs to the token, not to its place: drawn by logical block, placed afterwards.
    k_scale, v_scale = (
        random_scale(kind, case, num_blocks, generator) for kind in (case.k_scale, case.v_scale)
    )
    k_scale_given, v_scale_given = (
        place_scale(scale, num_blocks, device, poison) for scale in (k_scale, v_scale)
    )
    junk = torch.tensor(UNUSED_TABLE_IDS, dtype=torch.int32).roll(placement)
    tables = junk.repeat(len(case.seqs), ceil(width / len(junk)))[:, :width].contiguous()
    used = torch.zeros(num_blocks, case.block_size, dtype=torch.bool)
    query = row_view(
        (case.num_tokens, num_q_heads, case.head_dim), case.dtype, case.query_layout, float(poison), device
    )

    keys, values, queries = [], [], []
    first_block = first_row = 0
    for s, (query_len, seq_len) in enumerate(case.seqs):
        logical = first_block + torch.arange(widths[s])
        tables[s, : widths[s]] = order[logical].to(torch.int32)
        shape = (num_kv_heads, seq_len, case.head_dim)
        token = torch.arange(seq_len)
        logical_block, offset = first_block + token // case.block_size, token % case.block_size
        block = order[logical_block]
        seen = ~hidden(case, query_len, seq_len)
        used[block[seen], offset[seen]] = True
        k, v = random_rows(case, shape, case.magnitude, generator), torch.randn(shape, generator=generator)
        if case.broken:
            break_rows(k, v, case.broken)
        dense = []
        for rows, scale, given, cache in (
            (k, k_scale, k_scale_given, key_cache),
            (v, v_scale, v_scale_given, value_cache),
        ):
            token_scale = torch.ones(1, 1) if scale is None else scale[0]  # [Hkv or 1, 1]
            if scale is not None and scale.shape[0] > 1:
                token_scale = scale[logical_block, :, offset].T  # [Hkv, seq_len]
                given[block, :, offset] = token_scale.T.to(device)
            stored = store(rows / token_scale[..., None], case.stored_dtype)
            write(cache, block[seen], offset[seen], stored[:, seen])
            dense.append(stored.double() * token_scale[..., None].double())
        keys.append(dense[0])
        values.append(dense[1])
        q = random_rows(case, (num_q_heads, query_len, case.head_dim), 2 * case.magnitude, generator).to(
            case.dtype
        )
        query[first_row : first_row + query_len] = q.transpose(0, 1).to(device)
        queries.append(q)
        first_block, first_row = first_block + widths[s], first_row + query_len

    lens = torch.tensor([seq_len for _, seq_len in case.seqs], dtype=torch.int32)
    query_lens = torch.tensor([0] + [query_len for query_len, _ in case.seqs])
    slopes = torch.randn(num_q_heads, generator=generator).abs() * 0.3 if case.alibi else None
    sinks = None if case.sinks is None else case.sinks + torch.randn(num_q_heads, generator=generator)
    args = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": tables.to(device),
        "seq_lens": lens.to(device),
        "query_start_loc": query_lens.cumsum(0).to(torch.int32).to(device),
        "max_query_len": int(query_lens.max()),
        "max_seq_len": max((seq_len for _, seq_len in case.seqs), default=0),
        "scale": case.scale,
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "alibi_slopes": None if slopes is None else slopes.to(device),
        "sinks": None if sinks is None else sinks.to(device),
        "k_scale": k_scale_given,
        "v_scale": v_scale_given,
    }
    return Inputs(case, args, keys, values, queries, used)


def place_scale(scale: Tensor | None, num_blocks: int, device: str, poison: str) -> Tensor | None:
    """A scale in the shape that an op takes: [1], [Hkv], or a strided [N, Hkv, B] full of poison for now."""
    if scale is None:
        return None
    if scale.shape[0] == 1:
        return scale.flatten().to(device)
    _, heads, block_size = scale.shape
    return torch.full((num_blocks, block_size, heads + 1), float(poison), device=device)[..., 1:].transpose(
        1, 2
    )


def pytorch_attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The same attention by PyTorch in the query's dtype: the measure of what error is reasonable.

    scaled_dot_product_attention where it can express the case; else, and for the LSE, a plain computation
    that rounds where it does: products of the dtype, scores and softmax in float32, probabilities and output
    in the dtype. Kernels may take bfloat16 queries over int8 keys as 16-bit integers, and so the LSE does here.
    """
    case = inputs.case
    group = case.heads[0] // case.heads[1]
    outs, lses = [], []
    slopes, sinks = (
        None if t is None else t.cpu() for t in (inputs.args["alibi_slopes"], inputs.args["sinks"])
    )
    for (query_len, seq_len), q, k, v in zip(
        case.seqs, inputs.queries, inputs.keys, inputs.values, strict=True
    ):
        mask = visible(case, query_len, seq_len)
        exact_k, k, v = (
            rows.repeat_interleave(group, 0) for rows in (k.float(), k.to(case.dtype), v.to(case.dtype))
        )
        score_q = q.float()
        if (case.dtype, case.cache_dtype) == (torch.bfloat16, torch.int8):
            unit = torch.exp2(q.float().abs().amax(-1, keepdim=True).log2().floor() - 14)
            score_q = (score_q / unit).round() * unit
        scores = score_q @ exact_k.transpose(1, 2) * case.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if slopes is not None:
            query_pos = seq_len - query_len + torch.arange(query_len)
            scores = scores + slopes[:, None, None] * (torch.arange(seq_len) - query_pos[:, None])
        scores = scores.masked_fill(~mask, -inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, query_len, 1)], dim=2)
        p = torch.softmax(scores, dim=2)[..., :seq_len]
        if case.softcap or case.alibi or sinks is not None or not mask.numel():
            out = (p.to(case.dtype).float() @ v.float()).to(case.dtype)
        else:
            out = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=case.scale
            )[0]
        sees_none = ~mask.any(dim=1)
        outs.append(out.masked_fill(sees_none[:, None], 0).transpose(0, 1))
        lses.append(torch.logsumexp(scores, dim=2).masked_fill(sees_none, -inf).transpose(0, 1))
    empty = torch.empty(0, case.heads[0], case.head_dim, dtype=case.dtype)
    return torch.cat([empty, *outs]), torch.cat([empty[..., 0].float(), *lses])


# The rows. Most take MIXED, so that every feature meets decode, prefill, chunks and empty sequences at once.

SPLITS = tuple((1, n) for n in (255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 1536))

CORRECT = [
    *[Case(dtype=dtype) for dtype in FLOATS],
    *[Case(dtype=dtype, block_size=b) for dtype in FLOATS for b in (1, 3, 8, 32, 128, 1024)],
    *[
        Case(dtype=dtype, head_dim=d)
        for dtype in FLOATS
        for d in (1, 2, 7, 8, 16, 17, 32, 33, 40, 72, 80, 96, 100, 112, 128, 129, 160, 192, 200, 255, 256)
    ],
    *[
        Case(dtype=dtype, heads=heads, head_dim=d)
        for dtype in (torch.float32, torch.bfloat16)
        for heads in (
            (1, 1),
            (2, 2),
            (2, 1),
            (6, 2),
            (8, 2),
            (5, 1),
            (12, 2),
            (14, 2),
            (8, 1),
            (12, 1),
            (33, 1),
        )
        for d in (32, 128)
    ],
    *[
        Case(dtype=dtype, cache_layout=layout, query_layout=query_layout, head_dim=40, block_size=8)
        for dtype in FLOATS
        for layout, query_layout in (
            ("hnd", "packed"),
            ("interleaved", "fused"),
            ("head_major", "head_first"),
            ("padded", "padded"),
        )
    ],
    *[Case(dtype=dtype, window=w) for dtype in FLOATS for w in (1, 2, 7, 16, 17, 40, 1000)],
    *[Case(dtype=dtype, causal=False, window=w) for dtype in FLOATS for w in (-1, 1, 9)],
    *[Case(dtype=dtype, softcap=c, magnitude=m) for dtype in FLOATS for c, m in ((30.0, 1.0), (2.0, 2.0))],
    *[Case(dtype=dtype, alibi=True, causal=c) for dtype in FLOATS for c in (True, False)],
    *[Case(dtype=dtype, sinks=s) for dtype in FLOATS for s in (0.0, 60.0, -60.0)],
    *[
        Case(dtype=dtype, window=20, softcap=10.0, alibi=True, sinks=1.0, heads=(6, 2), head_dim=80)
        for dtype in FLOATS
    ],
    *[
        Case(dtype=dtype, cache_dtype=cache, k_scale=scale, v_scale=scale)
        for dtype in FLOATS
        for cache in QUANTISED
        for scale in ("none", "tensor", "head", "token")
    ],
    *[
        Case(
            dtype=dtype,
            cache_dtype=cache,
            k_scale=k,
            v_scale=v,
            cache_layout="padded",
            head_dim=33,
            softcap=5.0,
            window=30,
        )
        for dtype in FLOATS
        for cache in QUANTISED
        for k, v in (("head", "token"), ("token", "tensor"))
    ],
    *[Case(dtype=dtype, seqs=SPLITS, heads=heads) for dtype in FLOATS for heads in ((2, 2), (4, 1))],
    *[Case(dtype=dtype, seqs=((40, 530), (300, 300), (3, 1030)), heads=(4, 2)) for dtype in FLOATS],
    Case(seqs=SPLITS, heads=(4, 1), window=100, sinks=0.0, alibi=True, block_size=32),
    Case(seqs=((1, 5000), (1, 9)), heads=(2, 1), dtype=torch.bfloat16, block_size=128, head_dim=128),
    Case(
        seqs=((1, 700), (20, 600)),
        cache_dtype=torch.int8,
        k_scale="token",
        v_scale="token",
        dtype=torch.bfloat16,
    ),
    # Long sums of products: in a single chain of additions they lose more than PyTorch does.
    Case(
        seqs=((21, 20), (13, 12), (1, 90), (12, 12)),
        heads=(18, 3),
        head_dim=228,
        block_size=23,
        cache_dtype=torch.int8,
        k_scale="tensor",
        v_scale="tensor",
        causal=False,
        window=61,
        sinks=5.0,
        cache_layout="interleaved",
        query_layout="fused",
    ),
]

CORNER = [
    Case(seqs=()),
    Case(seqs=((0, 0),)),
    Case(seqs=((0, 33), (0, 0))),
    Case(seqs=((1, 0), (3, 0), (1, 5))),  # rows that see no key
    Case(seqs=((1, 0), (3, 0), (1, 5)), sinks=0.0),
    Case(seqs=((1, 0), (3, 0), (1, 5)), causal=False),
    *[Case(seqs=((1, n), (n, n)), dtype=dtype) for dtype in FLOATS for n in (1, 15, 16, 17, 32)],
    Case(seqs=((1, 1), (1, 2), (1, 3)), block_size=1, head_dim=1, heads=(1, 1)),
    # Scores beyond the range of exp and of float16; whole numbers, so that no rounding decides the maximum.
    *[Case(magnitude=m, integers=True, dtype=dtype) for dtype in FLOATS for m in (8.0, 32.0)],
    # Scores whose rounding alone is more than exp can take, if the largest is not rounded as all others are. With
    # sinks, as PyTorch's fused kernel is wrong there.
    Case(magnitude=2.0**20, integers=True, head_dim=32, sinks=0.0, dtype=torch.bfloat16),
    *[Case(magnitude=8.0, integers=True, softcap=50.0, dtype=dtype) for dtype in FLOATS],
    *[Case(sinks=s, dtype=dtype) for dtype in FLOATS for s in (1e4, -1e4, -inf)],
    # Masks select, they do not multiply: a NaN reaches just the rows that see it.
    *[
        Case(broken=what, dtype=dtype, heads=(4, 2), causal=causal, window=window)
        for dtype in FLOATS
        for what in ("k", "v", "kv")
        for causal, window in ((True, -1), (True, 2), (False, 3))
    ],
    *[
        Case(broken="v", dtype=dtype, cache_dtype=cache, window=2, k_scale="head", v_scale="token")
        for dtype in FLOATS
        for cache in (torch.float8_e4m3fn, torch.float8_e5m2)
    ],
    Case(broken="v", seqs=((1, 1100), (4, 1030)), window=2),
]
